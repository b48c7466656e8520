"""Names of 0.3 that have changed: they are what their new names are, with a ``DeprecationWarning``, for one version."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest

from tests.repository.test_rooms import ROOT

RENAMED = {
    "hpstage.store.Leases": "hpstage.store.Journal",
    "hpstage.store.Snapshots": "hpstage.store.Journal",
    "hpstage.store.Store": "hpstage.store.Journal",
    "hpstage.testing.LeasesContract": "hpstage.testing.JournalContract",
    "hpstage.testing.SnapshotsContract": "hpstage.testing.JournalContract",
    "hpstage.testing.StoreContract": "hpstage.testing.JournalContract",
    "hpstage.plan.audits.AuditFigures": "hpstage.accounting.audits.AuditFigures",
    "hpstage.plan.audits.AuditReport": "hpstage.accounting.audits.AuditReport",
    "hpstage.plan.bound.Speeds": "hpstage.accounting.bound.Speeds",
    "hpstage.plan.savings.Savings": "hpstage.accounting.savings.Savings",
    "hpstage.report.book.Book": "hpstage.accounting.book.Book",
    "hpstage.report.causes.Causes": "hpstage.accounting.causes.Causes",
    "hpstage.report.logs.TrialLog": "hpstage.report.trial_log.TrialLog",
    "hpstage.report.tables.Table": "hpstage.accounting.tables.Table",
}


def found(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_name_of_the_last_release_works_with_a_deprecation_warning(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"^{old} is deprecated; use {new}$") as warned:
        assert found(old) is found(new)
    assert warned[0].filename == __file__


@pytest.mark.parametrize("module", sorted({old.rpartition(".")[0] for old in RENAMED}))
def test_a_renamed_or_moved_name_is_in_the_changelog_and_others_are_missing_without_a_warning(module: str) -> None:
    assert module in (ROOT / "CHANGELOG.md").read_text().partition("## 0.3.0")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("nothing", "__wrapped__"):
            with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
                found(f"{module}.{name}")


def test_modules_that_were_moved_are_attributes_of_their_package() -> None:
    from hpstage import report

    assert report.tables.__name__ == "hpstage.report.tables"
