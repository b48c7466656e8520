"""Code identity: changes when the code that trains changes, and only then."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.metadata
import os
import random
import subprocess
import sys
import sysconfig
import textwrap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpstage.errors import UsageError
from hpstage.training.borrowed import Borrowed
from hpstage.training.capture.kinds import kind_of
from hpstage.training.code.owner import is_users, is_users_file
from hpstage.training.code.source import distributions_of
from hpstage.training.identity.code_identity import code_identity
from hpstage.training.trainables import as_trainable
from tests.torch.trainables import Small, adam, ordinary_loop

pytestmark = pytest.mark.sampled(10)

SCRIPT = '''
import math
import helpers
from helpers import scale

WIDTH = 3
OTHER = 4


class Base:
    def __init__(self, depth=2):
        self.depth = depth

    def shared(self):
        return 1


class Digits(Base):
    """What it is."""

    rate = 0.5

    def model(self):
        # a comment
        def inner():
            return WIDTH
        return helpers.layers.build(inner()) + scale(1) + math.pi

    @property
    def half(self):
        return self.rate / 2

    @staticmethod
    def fixed():
        return {"a", "b", "c"}


def train(run):
    from late import chosen
    return decorated(run) + chosen()


def twice(function):
    import functools

    @functools.wraps(function)
    def wrapper(*args):
        return 2 * function(*args)
    return wrapper


@twice
def decorated(run):
    return 5


def space(trial):
    return OTHER
'''
HELPERS = """
import layers

FACTOR = 2


def scale(x):
    return x * FACTOR


def unused():
    return 1
"""
LAYERS = """
def build(width):
    return [width] * 2
"""
LATE = """
def chosen():
    return 7
"""

Identities = Callable[..., tuple[dict[str, str], dict[str, str]]]


@pytest.fixture
def identities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Identities:
    """The identities of an object of class Digits and of the function train, in modules with some text replaced."""
    made = 0

    def identify(*changes: tuple[str, str]) -> tuple[dict[str, str], dict[str, str]]:
        nonlocal made
        made += 1
        folder = tmp_path / str(made)
        folder.mkdir()
        texts = {"script": SCRIPT, "helpers": HELPERS, "layers": LAYERS, "late": LATE}
        for old, new in changes:
            assert any(old in text for text in texts.values()), old
            texts = {name: text.replace(old, new) for name, text in texts.items()}
        for name, text in texts.items():
            (folder / f"{name}.py").write_text(text)
            monkeypatch.delitem(sys.modules, name, raising=False)
        with monkeypatch.context() as context:
            context.syspath_prepend(str(folder))
            script = importlib.import_module("script")
            found = code_identity(script.Digits()), code_identity(script.train)
        for name in texts:
            sys.modules.pop(name, None)
        return found

    return identify


@pytest.mark.parametrize(
    "change",
    [
        ("# a comment", "# another comment\n"),
        ("What it is.", "What it was."),
        ('{"a", "b", "c"}', "{\n  'a',\n  'b',   'c'}"),
        ("OTHER = 4", "OTHER = 5"),
        ("return OTHER", "return OTHER + 1"),
        ("def unused():\n    return 1", "def unused():\n    return 2"),
        ("def space(trial)", "NEW = 3\n\n\ndef space(trial)"),
    ],
)
@pytest.mark.ci_one_in(2)
def test_an_edit_that_does_not_affect_training_keeps_the_identity_of_the_code(
    change: tuple[str, str], identities: Identities
) -> None:
    assert identities(change) == identities()


@pytest.mark.parametrize(
    "change",
    [
        ("self.rate / 2", "self.rate / 3"),
        ("rate = 0.5", "rate = 0.25"),
        ("WIDTH = 3", "WIDTH = 4"),
        ('"a", "b"', '"a", "z"'),
        ("def shared(self):\n        return 1", "def shared(self):\n        return 2"),
        ("depth=2", "depth=3"),
        ("FACTOR = 2", "FACTOR = 3"),
        ("x * FACTOR", "x + FACTOR"),
        ("[width] * 2", "[width] * 3"),
        ("math.pi", "math.e"),
    ],
)
@pytest.mark.ci_one_in(2)
def test_an_edit_of_code_that_a_class_uses_changes_its_identity(
    change: tuple[str, str], identities: Identities
) -> None:
    changed, same = identities(change)
    digits, train = identities()
    assert changed != digits
    assert same == train


@pytest.mark.parametrize(
    "change", [("return 5", "return 6"), ("2 * function", "3 * function"), ("return 7", "return 8")]
)
def test_an_edit_of_code_that_a_function_uses_changes_its_identity(
    change: tuple[str, str], identities: Identities
) -> None:
    same, changed = identities(change)
    digits, train = identities()
    assert changed != train
    assert same == digits


def test_the_identity_of_code_is_equal_in_every_process(tmp_path: Path) -> None:
    for name, text in {"script": SCRIPT, "helpers": HELPERS, "layers": LAYERS, "late": LATE}.items():
        (tmp_path / f"{name}.py").write_text(text)
    program = "import script\nfrom hpstage.training.identity.code_identity import code_identity\n"
    program += "print(code_identity(script.Digits()), code_identity(script.train))"
    root = str(Path(__file__).parents[2])
    outputs = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([root, str(tmp_path)])}
        command = [sys.executable, "-c", program]
        outputs.add(
            subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        )
    assert len(outputs) == 1


def test_the_state_of_global_generators_is_not_in_the_identity() -> None:
    """They are keyed before each step; as they stand, they would give each process an identity of its own."""

    def train(run: Any) -> Any:
        return random.shuffle, np.random.permutation, np.random.normal, np.random.seed

    before = code_identity(train)
    random.seed(1)
    np.random.seed(1)
    assert code_identity(train) == before
    generator = np.random.default_rng(0)

    def draw(run: Any) -> Any:
        return generator.normal

    before = code_identity(draw)
    generator.normal()
    assert code_identity(draw) != before, "an object of the user's own counts as it is"


def test_code_without_source_is_identified_by_its_bytecode() -> None:
    def typed(text: str) -> Any:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(textwrap.dedent(text), names)  # as a read-eval-print loop does
        return names["train"]

    one = """
        def helper(x):
            return x + 1

        def train(run):
            return [helper(y) in {"a", "b", "c"} for y in run]
    """
    assert code_identity(typed(one)) == code_identity(typed(one.replace("helper(x):", "helper(x):  # adds")))
    assert code_identity(typed(one)) != code_identity(typed(one.replace("x + 1", "x + 2")))
    assert code_identity(typed(one)) != code_identity(typed(one.replace('"b"', '"d"')))


def closing_over(width: Any) -> Any:
    def train(run: Any) -> Any:
        return width

    return train


def test_values_in_a_closure_are_in_the_identity() -> None:
    assert code_identity(closing_over(3)) == code_identity(closing_over(3))
    assert code_identity(closing_over(3)) != code_identity(closing_over(4))
    assert code_identity(closing_over(np.arange(3))) != code_identity(closing_over(np.arange(4)))
    one, other = (functools.partial(closing_over, width) for width in (1, 2))
    assert code_identity(one) != code_identity(other)


def test_lambdas_on_one_line_are_distinguished() -> None:
    one, other = (lambda run: 1), (lambda run: 2)
    assert code_identity(one)["code"] != code_identity(other)["code"]


class Configured:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def train(self) -> None: ...


class Named(dict[str, int]):
    """A dict with an attribute."""

    def __init__(self, name: str) -> None:
        super().__init__(one=1)
        self.name = name


def referred_to_weakly(name: str) -> list[Any]:
    return [named := Named(name), weakref.ref(named)][::-1]


def of_this_thread(value: int) -> threading.local:
    made = threading.local()
    made.value = value
    return made


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (32, 64),
        (Named("a"), Named("b")),
        (Named("a"), {"one": 1}),
        ("a", "b"),
        ([1, {"a": None}], [1, {"a": 0}]),
        ((1, 2), (2, 1)),
        (np.arange(3), np.arange(3.0)),
        (torch.zeros(2), torch.ones(2)),
        (torch.float32, torch.float64),
        (adam, ordinary_loop),
        (torch.nn.ReLU, torch.nn.GELU),
        (torch.nn.CrossEntropyLoss(label_smoothing=0.1), torch.nn.CrossEntropyLoss(label_smoothing=0.2)),
        (Path("a"), Path("b")),
        (range(3), range(4)),
        (float("nan"), 0.0),
        (torch.device("cpu"), torch.device("cuda")),
        (torch.relu, torch.tanh),
        (functools.partial(adam, lr=1), functools.partial(adam, lr=2)),
        (referred_to_weakly("a"), referred_to_weakly("b")),
        (of_this_thread(1), of_this_thread(2)),
    ],
)
@pytest.mark.ci_one_in(2)
def test_attributes_of_a_trainable_are_in_the_identity_by_value(one: Any, other: Any) -> None:
    assert code_identity(Configured(a=one)) == code_identity(Configured(a=one))
    assert code_identity(Configured(a=one)) != code_identity(Configured(a=other))


def test_an_attribute_without_a_digest_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        UsageError, match=r"Configured\.lock is a lock, which has no digest.*state the attribute version"
    ):
        code_identity(Configured(lock=threading.Lock()))


def test_a_stated_version_replaces_the_code_and_attributes_without_a_digest() -> None:
    stated = code_identity(Configured(version="3", lock=threading.Lock(), width=3))
    assert stated == {**code_identity(Configured(version="3", width=3)), "code": "version 3"}
    assert stated != code_identity(Configured(version="3", width=4))
    assert stated != code_identity(Configured(version="4", width=3))


def test_an_adapter_has_the_identity_of_its_trainable_also_after_training() -> None:
    small = Small()
    before = code_identity(small)
    trainable = as_trainable(small)
    trainable.setup({"lr": 0.1, "momentum": 0.9, "batch_size": 4})
    trainable.evaluate()
    assert code_identity(trainable) == before
    assert code_identity(as_trainable(ordinary_loop)) == code_identity(ordinary_loop)
    assert before != code_identity(Small(adam))


CRITERION = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
REGISTRY: dict[str, Any] = {"lock": threading.Lock()}


def uses_objects(run: Any) -> Any:
    return CRITERION, REGISTRY


def test_global_objects_are_in_the_identity_by_value_if_they_have_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_identity(uses_objects)
    with monkeypatch.context() as context:
        context.setitem(REGISTRY, "lock", threading.Lock())
        assert code_identity(uses_objects) == before
        context.setitem(REGISTRY, "more", torch.zeros(3))
        assert code_identity(uses_objects) != before
    monkeypatch.setattr(f"{__name__}.CRITERION", torch.nn.CrossEntropyLoss(label_smoothing=0.2))
    assert code_identity(uses_objects) != before


def test_objects_that_refer_to_themselves_have_an_identity() -> None:
    one, other = Configured(a=1), Configured(a=2)
    one.itself, other.itself = one, other  # type: ignore[attr-defined]
    assert code_identity(Configured(a=one)) == code_identity(Configured(a=one))
    assert code_identity(Configured(a=one)) != code_identity(Configured(a=other))


def test_a_stated_data_version_is_in_the_identity() -> None:
    assert code_identity(Configured(data_version="1")) != code_identity(Configured(data_version="2"))


def test_copying_an_instance_does_not_change_the_identity_of_its_class() -> None:
    class Pickled(Configured):
        pass

    before = code_identity(Pickled())
    copy.copy(Pickled())  # Python keeps notes on the class
    assert code_identity(Pickled()) == before


def test_reference_workloads_count_as_user_code_but_other_modules_of_hpstage_do_not() -> None:
    class Made:
        pass

    expected = kind_of(Made())
    assert is_users("hpstage.workloads.made")
    assert kind_of(type("Made", (), {"__module__": "hpstage.workloads.made"})()) is expected
    assert not is_users("hpstage.training.borrowed")
    assert kind_of(Borrowed(Made(), Made())) is not expected


@pytest.mark.parametrize(
    ("library", "name"), [("skorch", "SkorchTrainable"), ("stable_baselines3", "StableBaselines3Trainable")]
)
def test_trainables_of_hpstage_that_state_it_are_captured_as_the_users_are(library: str, name: str) -> None:
    pytest.importorskip(library)
    kind = getattr(importlib.import_module(f"hpstage.torch.{library}"), name)
    assert not is_users(kind.__module__)
    assert kind_of(object.__new__(kind)) is kind_of(Configured())


def test_files_in_the_scripts_folder_of_an_environment_belong_to_libraries() -> None:
    """Python finds it there first, for commands such as ``pytest`` and ``hpstage``."""
    assert not is_users_file(os.path.join(sysconfig.get_path("scripts"), "bottle.py"))


def test_files_put_into_any_folder_by_an_installer_belong_to_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("installed", "written"):
        (tmp_path / folder / f"package_{folder}").mkdir(parents=True)
        (tmp_path / folder / f"package_{folder}" / "__init__.py").touch()
        (tmp_path / folder / f"module_{folder}.py").touch()
        monkeypatch.syspath_prepend(tmp_path / folder)
    (tmp_path / "installed" / "Another_Name-1.0.dist-info").mkdir()
    for kind in ("package", "module"):
        assert not is_users(f"{kind}_installed")
        assert is_users(f"{kind}_written")


def test_a_folder_named_like_a_standard_library_module_counts_as_user_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many projects have their sources in a folder ``code``, which Python finds before its own module."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "__init__.py").touch()
    (tmp_path / "profile.py").touch()
    known = is_users.__wrapped__  # which remembers nothing of earlier tests
    for name in ("code", "profile"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        assert not known(name)
    monkeypatch.syspath_prepend(tmp_path)
    assert known("code") and known("code.model") and known("profile")
    assert not any(map(known, ("sys", "json", "math", "_thread", "os.path")))


def test_the_distributions_of_a_package_are_found() -> None:
    known = importlib.metadata.packages_distributions()
    for package in ("sklearn", "yaml", "dateutil", "_pytest"):
        assert distributions_of(package) == tuple(sorted(set(known[package]))) != ()
    assert distributions_of("torch") == ("torch",)
    assert distributions_of("no_such_package") == ()


def test_the_distribution_of_a_package_is_found_without_top_level_txt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "fast_layers-1.0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: fast-layers\nVersion: 1.0\n")
    (made / "RECORD").write_text(
        '"fastlayers/a,b.py",,\nfastops.cpython-311-x86_64-linux-gnu.so,,\nfast_layers-1.0.dist-info/RECORD,,\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = ("fastlayers", "fastops", "fast_layers-1", "layers")
    assert [distributions_of(name) for name in names] == [("fast-layers",), ("fast-layers",), (), ()]
