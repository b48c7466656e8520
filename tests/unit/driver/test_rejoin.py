"""A driver that others have taken for dead joins them again, and its search ends as if nothing had been."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.accounting.savings import merged
from hpstage.algos import ASHA, SuccessiveHalving
from hpstage.errors import HistoryChanged
from hpstage.plan.facts import DriverLeft
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape
from tests.invariants import validate
from tests.records import separated

pytestmark = pytest.mark.sampled(4)

STEPS = 16


def space(trial: optuna.Trial) -> dict[str, object]:
    a = s.piecewise({0: trial.suggest_int("a", 1, 2), 6: trial.suggest_int("late", 1, 3)})
    return {"a": a, "b": trial.suggest_float("b", 0.5, 1.0, step=0.5)}


class Burial:
    """Takes the driver's lease and says that it is gone, after each of ``after`` trials: what other drivers do."""

    def __init__(self, journal: MemoryJournal, after: set[int], *, silent: bool) -> None:
        self._journal = journal
        self._after = after
        self._silent = silent
        self.drivers: list[str] = []
        self._seen = 0

    def __call__(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        self._seen += 1
        if self._seen not in self._after:
            return
        joined = [record for record in separated(self._journal).read() if b'"DriverJoined"' in record]
        driver = msgspec.json.decode(joined[-1])["driver"]
        held = self._journal.holder(f"driver/{driver}")
        if held is None:
            return  # it has not noticed yet what was done to it
        self.drivers.append(driver)
        self._journal.release(f"driver/{driver}", held.token)
        if not self._silent:
            self._journal.append([msgspec.json.encode(DriverLeft(driver, 0.0, "gone"))])


def search(journal: MemoryJournal, algorithm: object, **options: object) -> hpstage.Result:
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=3, n_startup_trials=4))
    return hpstage.optimize(
        study,
        Tape(),
        space,
        metric="score",
        steps=STEPS,
        n_trials=10,
        algorithm=algorithm,  # type: ignore[arg-type]
        executor=hpstage.InlineExecutor(),
        store=journal,
        **options,  # type: ignore[arg-type]
    )


def outcome(result: hpstage.Result) -> list[object]:
    return [(t.params, t.state, t.values, t.intermediate_values) for t in result.study.trials]


@pytest.mark.ci
@pytest.mark.parametrize("silent", [False, True], ids=["buried", "lease taken"])
@pytest.mark.parametrize("algorithm", [None, SuccessiveHalving(min_steps=4, reduction_factor=2)])
def test_a_search_whose_driver_was_wrongly_declared_dead_ends_with_unchanged_results(algorithm, silent, caplog):
    undisturbed = search(MemoryJournal(), algorithm)
    journal = MemoryJournal()
    burial = Burial(journal, {1, 4, 5, 9}, silent=silent)
    with caplog.at_level(logging.WARNING, "hpstage"):
        found = search(journal, algorithm, callbacks=[burial])
    assert len(set(burial.drivers)) == len(burial.drivers) >= 2
    assert sum("It rejoins" in record.message for record in caplog.records) == len(burial.drivers)
    assert outcome(found) == outcome(undisturbed)
    assert found.plan.totals.steps_trained == undisturbed.plan.totals.steps_trained
    validate(found.plan)
    assert not found.plan.chains


def test_an_asynchronous_search_continues_after_its_driver_was_wrongly_declared_dead() -> None:
    journal = MemoryJournal()
    found = search(journal, ASHA(min_steps=4, reduction_factor=2), callbacks=[Burial(journal, {2}, silent=False)])
    assert all(trial.state.is_finished() for trial in found.study.trials)
    assert found.plan.totals.steps_trained == merged(found.plan).steps_unique


def test_a_driver_wrongly_declared_dead_raises_if_another_process_now_drives_its_study() -> None:
    journal = MemoryJournal()

    def take_over(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        Burial(journal, {1}, silent=False)(study, trial)
        [name] = [name for name in journal._leases if name.startswith("study/")]
        held = journal.holder(name)
        assert held is not None
        journal.release(name, held.token)
        assert journal.acquire(name, "another", 3600.0) is not None

    with pytest.raises(hpstage.errors.UsageError, match="driven by another process"):
        search(journal, None, callbacks=[take_over])


class Losing(MemoryJournal):
    """Raises one time that it has lost records: when a chain is claimed, before it is started."""

    def __init__(self, claim: int) -> None:
        super().__init__()
        self._claim = claim
        self.claims = 0

    def append(self, records: Sequence[bytes], **options: Any) -> int | None:
        self.claims += any(b'"ChainStarted"' in record for record in records)
        if self.claims == self._claim:
            self.claims += 1
            raise HistoryChanged("the journal has lost records")
        return super().append(records, **options)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("claim", [1, 3])
def test_a_search_ends_with_unchanged_results_if_the_claim_of_a_chain_fails_once(
    claim: int, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = search(MemoryJournal(), None)
    journal = Losing(claim)
    with caplog.at_level(logging.WARNING, "hpstage"):
        found = search(journal, None)
    assert journal.claims > claim
    assert "This process restarts the search now" in caplog.text
    assert outcome(found) == outcome(undisturbed)
    assert not found.plan.chains and not found.plan.drivers
