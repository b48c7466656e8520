"""A fork is verified under each kind of values, once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from hpstage import schedule as s
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import ChainId, WorkerId
from hpstage.plan.messages import Amendment, Chain, Stage, Verify
from hpstage.plan.regimes import Regime, Regimes, is_news, regime
from hpstage.schedule import Constant, Scalar, Schedule
from hpstage.store import MemoryJournal
from tests.unit.searches import Search, trial


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ((-3, -0.5), "< 0"),
        ((0, 0.0, -0.0), "0"),
        ((1e-9, 0.5, 0.999), "< 1"),
        ((1, 1.0), "1"),
        ((1.001, 64, 1e9), "> 1"),
        ((True,), "True"),
        ((False,), "False"),
        ((None,), "None"),
        (("adam",), "'adam'"),
    ],
)
def test_a_regime_groups_numbers_by_range_and_takes_other_values_as_they_are(
    values: tuple[object, ...], kinds: str
) -> None:
    for value in values:
        assert regime(["a"], [Constant(value)], [Constant(value)]) == (("a", kinds),)


def test_a_nonzero_number_that_has_changed_is_in_another_regime() -> None:
    assert regime(["a"], [Constant(0.5)], [Constant(0.1)]) == (("a", "< 1, changed"),)
    assert regime(["a"], [Constant(0)], [Constant(0.1)]) == (("a", "0"),)


def test_only_unseen_values_are_verified_after_many_regimes() -> None:
    seen = [(("a", str(i % 5)), ("b", str(i))) for i in range(16)]
    for known in ([Regimes(seen)], [Regimes(seen[:9]), Regimes(seen[5:])]):
        assert not is_news((("a", "1"), ("b", "2")), *known)
        assert is_news((("a", "1"), ("b", "99")), *known)
        assert not is_news(seen[0], *known)
    assert is_news((("a", "1"), ("b", "2")), Regimes(seen[:8]), Regimes(seen[:8]))


def test_a_regime_is_verified_again_after_all_chains_that_were_to_verify_it_ended() -> None:
    regimes = Regimes([(("a", "1"),), (("a", "1"),)])
    regimes.remove((("a", "1"),))
    assert not is_news((("a", "1"),), regimes)
    regimes.remove((("a", "1"),))
    assert len(regimes) == 0 and is_news((("a", "1"),), regimes)


class Verifying(SimulatedExecutor):
    """Records where it is to verify."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.verified: list[tuple[str, Regime]] = []
        self._initial: dict[ChainId, Mapping[str, Scalar]] = {}

    def start(self, worker: WorkerId, chain: Chain) -> None:
        super().start(worker, chain)
        self._initial[chain.id] = chain.initial
        self._note(chain.id, chain.stages)

    def amend(self, amendment: Amendment) -> None:
        super().amend(amendment)
        self._note(amendment.chain, amendment.stages)

    def _note(self, chain: ChainId, stages: Iterable[Stage]) -> None:
        for stage in stages:
            if stage.verify:
                first = [Constant(self._initial[chain][name]) for name in stage.forms]
                self.verified.append((chain, regime(stage.forms, stage.forms.values(), first)))


def search(
    trials: list[dict[str, Schedule]],
    verify: Verify = "first-fork",
    workers: int = 2,
    journal: MemoryJournal | None = None,
) -> list[tuple[str, Regime]]:
    executor = Verifying(workers)
    Search(executor, journal, verify=verify, checkpoint_every=10**9).run(
        [trial(i, values, 12) for i, values in enumerate(trials)], [12] * len(trials)
    )
    return executor.verified


def test_each_regime_is_verified_once_however_many_workers_start_with_it() -> None:
    trials = [{"a": s.constant(a), "opt": s.constant(opt)} for a in (0.1, 0.2, 0.3, 3) for opt in ("sgd", "adam")]
    for workers in (1, 2, 8):
        regimes = [found for _, found in search(trials, workers=workers)]
        assert sorted(regimes) == sorted(
            (("a", a), ("opt", opt)) for a in ("< 1", "> 1") for opt in ("'adam'", "'sgd'")
        )


def test_a_later_stage_of_a_chain_is_verified_if_it_enters_a_new_regime() -> None:
    ((chain, first), (same, second)) = search([{"a": s.piecewise({0: 1, 6: 0.5})}], workers=1)
    assert (first, second) == ((("a", "1"),), (("a", "< 1, changed"),))
    assert chain == same
    assert len(search([{"a": s.piecewise({0: 0.5, 4: 0.25, 8: 0.125})}], workers=1)) == 2  # before and after a change


def test_a_regime_verified_by_an_earlier_call_is_not_verified_again() -> None:
    journal = MemoryJournal()
    assert len(search([{"a": s.constant(0.5)}], journal=journal)) == 1
    assert search([{"a": s.constant(0.5)}, {"a": s.constant(0.6)}], journal=journal) == []


def test_verify_all_verifies_every_chain_and_verify_off_verifies_no_chain() -> None:
    trials = [{"a": s.constant(a)} for a in (0.1, 0.2, 0.3)]
    assert len(search(trials, "all")) == 3
    assert search(trials, "off") == []
