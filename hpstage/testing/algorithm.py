"""AlgorithmContract: the obligations of every implementation of the Algorithm port."""

from __future__ import annotations

import copy
import hashlib
import math
import random
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from hpstage.algorithm import Algorithm, Setting
from hpstage.errors import UsageError
from hpstage.testing.play import Played, Proposed, Target, play

_SEEDS = range(40)


class _Trials(Proposed):
    """Trials with a pruner that decides at random, but equally for equal states and steps."""

    def __init__(self, lines: list[str] | None, salt: str, pruned_share: float) -> None:
        super().__init__(lines)
        self.salt = salt
        self._pruned_share = pruned_share

    def of_state(self, what: str, index: int, step: int) -> float:
        # Beyond its end, a trial has its last value. Trials that algorithms fork have no line.
        at = min(step, len(self.lines[index])) if self.lines is not None and index < len(self.lines) else step
        return _drawn(f"{what} {self.salt} {self.prefix(index, step)} {at}")

    def should_prune(self, index: int, step: int) -> bool:
        return self.of_state("pruner", index, step) < self._pruned_share


def _drawn(text: str) -> float:
    """Return a number in [0, 1) that depends on a text. (Seeding a generator by the text would slow down the tests.)"""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") / 2**48


@dataclass(frozen=True)
class _Scene:
    """A search in which a seed decides everything that the algorithm does not decide."""

    seed: str
    setting: Setting
    lines: list[str] | None  # for each trial, a letter for the values of each step; some may be shorter than others
    failing_share: float
    values: tuple[float, ...]
    order: tuple[int, ...]
    pruned_share: float = 0.3
    ahead: int = 0
    stop_after: int = 10**9

    def play(self, algorithm: Algorithm, *, sign: int = 1) -> Played:
        trials = _Trials(self.lines, self.seed, self.pruned_share)
        return play(
            algorithm,
            self.setting,
            lambda index, step: sign * self.values[int(trials.of_state("value", index, step) * len(self.values))],
            order=self.order,
            failing=_Failing(trials, self.failing_share),
            ahead=self.ahead,
            stop_after=self.stop_after,
            trials=trials,
        )


class _Failing(Container[Target]):
    """Random failures: of states, as if the user's code failed, and of single trials, as if their workers were lost too
    often."""

    def __init__(self, trials: _Trials, share: float) -> None:
        self._trials = trials
        self._share = share

    def __contains__(self, target: object) -> bool:
        assert isinstance(target, tuple)
        index, step = target
        alone = _drawn(f"alone {self._trials.salt} {index} {step}") < self._share / 4
        return alone or self._trials.of_state("failure", index, step) < self._share


class AlgorithmContract:
    """Subclass it, name the subclass ``Test...`` and override the fixture ``algorithm``.

    ``class TestMyAlgorithm(AlgorithmContract): ...``. Searches have 1 to 30 trials of ``steps`` steps; settings that
    the algorithm refuses are skipped.
    """

    steps: ClassVar[int] = 9

    @pytest.fixture
    def algorithm(self) -> Algorithm:
        """The algorithm; it must accept 30 trials of ``steps`` steps."""
        raise NotImplementedError("override the fixture algorithm")

    def test_every_trial_ends_once_whatever_fails_and_in_whatever_order_results_arrive(
        self, algorithm: Algorithm
    ) -> None:
        for scene in self._scenes(algorithm):
            draw = random.Random(f"interrupted {scene.seed}")
            n = scene.setting.n_trials or 0
            replace(scene, ahead=draw.randint(0, n), stop_after=draw.choice([0, 1, 5, 20, 10**9])).play(algorithm)

    def test_a_search_in_which_everything_fails_comes_to_its_end(self, algorithm: Algorithm) -> None:
        for scene in self._scenes(algorithm):
            assert set(replace(scene, failing_share=1.0).play(algorithm).ends.values()) == {"failed"}

    def test_a_search_in_which_nothing_fails_has_a_complete_trial(self, algorithm: Algorithm) -> None:
        for scene in self._scenes(algorithm):
            smooth = replace(scene, failing_share=0.0, pruned_share=0.0)
            ends = set(smooth.play(algorithm).ends.values())
            assert "complete" in ends, "no trial failed, but none is complete, so there is no best trial"

    def test_a_search_without_n_trials_continues_until_it_is_stopped_or_is_refused(self, algorithm: Algorithm) -> None:
        endless = Setting(steps=self.steps, n_trials=None, maximize=False, adaptive=False)
        try:
            algorithm.check(endless)
        except UsageError:
            return
        assert (
            len(play(algorithm, endless, lambda index, step: float(index * step % 7), stop_after=300).reported) >= 300
        )

    def test_decisions_depend_only_on_the_reported_results(self, algorithm: Algorithm) -> None:
        """Global generators, and other searches by the same algorithm object, have no influence."""
        for scene in self._scenes(algorithm):
            first = scene.play(algorithm)
            random.random()
            assert scene.play(copy.deepcopy(algorithm)) == first == scene.play(algorithm)

    def test_an_interrupted_search_that_is_resumed_decides_and_proposes_the_same(self, algorithm: Algorithm) -> None:
        """Trials proposed by an interrupted call are added before any result is reported. An asynchronous search loses
        the order in which results arrived, but must still end."""
        for scene in self._scenes(algorithm):
            expected = scene.play(algorithm)
            ahead = random.Random(f"ahead {scene.seed}").randint(0, scene.setting.n_trials or 0)
            again = replace(scene, ahead=ahead).play(algorithm)
            if algorithm.synchronous:
                assert (again.requested, again.reported, again.forks, again.ends) == (
                    expected.requested,
                    expected.reported,
                    expected.forks,
                    expected.ends,
                )
                assert again.proposed_after[ahead:] == expected.proposed_after[ahead:]

    def test_maximizing_values_decides_like_minimizing_their_negatives(self, algorithm: Algorithm) -> None:
        for scene in self._scenes(algorithm):
            other = replace(scene, setting=replace(scene.setting, maximize=not scene.setting.maximize))
            assert scene.play(algorithm) == other.play(algorithm, sign=-1)

    def test_the_repr_of_an_algorithm_names_its_class_and_does_not_change(self, algorithm: Algorithm) -> None:
        before = repr(algorithm)
        assert type(algorithm).__name__ in before
        assert " at 0x" not in before
        next(self._scenes(algorithm)).play(algorithm)
        assert repr(algorithm) == before == repr(copy.deepcopy(algorithm))

    def _scenes(self, algorithm: Algorithm) -> Iterator[_Scene]:
        """Yield random searches. The first has 30 trials."""
        for seed in _SEEDS:
            draw = random.Random(seed)
            n = 30 if seed == 0 else draw.randint(1, 30)
            setting = Setting(steps=self.steps, n_trials=n, maximize=draw.random() < 0.5, adaptive=draw.random() < 0.5)
            try:
                algorithm.check(setting)
            except UsageError:
                assert seed, f"{algorithm} refuses 30 trials of {self.steps} steps"
                continue
            # Few values, so that trials often tie, and trials with common prefixes.
            values = (-2.0, -1.0, 0.0, 1.0, 2.0)
            lines = ["".join(draw.choice("aab") * 2 for _ in range(self.steps)) for _ in range(n)]
            if draw.random() < 0.5 and not algorithm.forks:
                lines = [line[: draw.randint(1, self.steps)] for line in lines]
            yield _Scene(
                seed=str(seed),
                setting=setting,
                lines=lines if draw.random() < 0.5 else None,
                failing_share=draw.choice([0.0, 0.2, 0.5, 0.8]),
                values=(*values, math.inf, -math.inf) if draw.random() < 0.3 else values,
                order=tuple(draw.randrange(31) for _ in range(200)),
            )
