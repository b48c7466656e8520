"""A study or store of another workload: the error, and the warning, name what differs."""

from __future__ import annotations

import importlib

import pytest

from hpstage.errors import StoreError, UsageError
from hpstage.plan.same_workload import differing
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape
from hpstage.training.identity.code_identity import by_name
from tests.unit.search.test_optimize import create, run

pytestmark = pytest.mark.sampled(16)


def test_a_changed_version_of_the_trainable_is_refused_as_another_workload():
    class Other(Tape):
        version = "2"

    journal = MemoryJournal()
    run(create(), store=journal)
    with pytest.raises(StoreError, match=r"another workload .*a stated `version` is part of the workload"):
        run(create(), Other(), store=journal)


def test_the_error_of_another_workload_suggests_removing_the_store_if_nothing_was_trained():
    class Refused(Tape):
        version = "2"

        def train(self, step, hp):
            raise ValueError("a first attempt")

    journal = MemoryJournal()
    run(create(), Refused(), store=journal)
    with pytest.raises(StoreError, match="choose another store or remove this one, since nothing was trained on it"):
        run(create(), store=journal)


def test_the_error_of_another_workload_names_the_attributes_that_differ():
    class Noisy(Tape):
        version = None

        def __init__(self, noise, same=1):
            super().__init__()
            self.noise, self.same = noise, same

    journal = MemoryJournal()
    run(create(), Noisy([0.1]), store=journal)
    with pytest.raises(StoreError, match=r"another workload \(attribute noise\); choose"):
        run(create(), Noisy([0.2]), store=journal)
    Noisy.version = "1"
    run(create(), Noisy([0.1]), store=(journal := MemoryJournal()))
    with pytest.raises(StoreError, match=r"another workload \(attribute noise; attribute same\); choose"):
        run(create(), Noisy([0.2], 2), store=journal)


def test_the_error_of_another_workload_names_the_edited_function(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = "from hpstage.testing.toys import Tape\nclass Edited(Tape):\n    version = None\n    def evaluate(self):\n"
    helper = "        return {'score': gain(), 'hash': 0.0}\ndef gain():\n    return "
    (tmp_path / "edited_helper.py").write_text(f"{source}{helper}1.0\n")
    import edited_helper  # type: ignore[import-not-found]

    journal = MemoryJournal()
    run(create(), edited_helper.Edited(), store=journal)
    (tmp_path / "edited_helper.py").write_text(f"{source}{helper}100.0\n")
    importlib.reload(edited_helper)
    with pytest.raises(StoreError, match=r"another workload \(edited since: edited_helper\.gain\); "):
        run(create(), edited_helper.Edited(), store=journal)


@pytest.mark.parametrize("first", [None, "1"])
def test_adding_or_removing_a_version_is_not_reported_as_an_edit(first):
    class Versioned(Tape):
        version = first

    journal = MemoryJournal()
    run(create(), Versioned(), store=journal)
    again = Versioned()
    again.version = "1" if first is None else None
    with pytest.raises(StoreError, match=r"another workload \(code: .*a stated `version` is part of the workload"):
        run(create(), again, store=journal)


def test_a_search_warns_if_its_study_has_trials_of_another_workload(caplog):
    class Other(Tape):
        version = "2"

    study = create()
    run(study, n_trials=2)
    assert "trials of another plan" not in caplog.text
    run(study, Other(), n_trials=2)
    assert "trials of another plan" in caplog.text


def test_the_warning_about_another_plan_names_its_folder_and_what_differs(caplog, tmp_path, monkeypatch):
    class Other(Tape):
        version = "2"

    monkeypatch.chdir(tmp_path)
    study = create()
    run(study, n_trials=2, store=None)
    [folder] = (tmp_path / ".hpstage").iterdir()
    result = run(study, Other(), n_trials=2, store=None)
    assert f"another plan in .hpstage/{folder.name} (" in caplog.text
    assert "code: 'version 1' there, 'version 2' here" in caplog.text
    with pytest.raises(UsageError, match=r"no trial '[^']+/0'; it has 2 trials, [^ ]+/2 to [^ ]+/3\."):
        result.trial(0)


def test_the_warning_about_another_plan_of_the_same_workload_names_its_folder(caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = create()
    run(study, n_trials=2, store=".hpstage/one")
    run(study, n_trials=2, store=".hpstage/other")
    assert "another plan in .hpstage/one (another store): they are not reused" in caplog.text


def test_packages_that_differ_are_named_with_their_versions():
    there = {"package sklearn": "scikit-learn 1.8.0", "script.Net": "a"}
    here = by_name({"package sklearn": "scikit-learn 1.9.1", "script.Net": "a"})
    changes = differing({"code": "bytecode 1"}, there, {"code": "bytecode 2"}, here)
    assert changes == ["package sklearn: 'scikit-learn 1.8.0' there, 'scikit-learn 1.9.1' here"]
