"""Verification of a fork: compares steps trained straight through with steps trained from the state a fork would load.

The comparison covers all that training can reach, not only weights, to find a hidden counter before it has an effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from hpstage.checkpoints.state_tree import digest, reread
from hpstage.errors import StateError
from hpstage.schedule import Scalar
from hpstage.trainable import Trainable
from hpstage.training.adapter import checked_metrics
from hpstage.training.capture.portrait import LOCAL, Difference, differences, first_difference, shown
from hpstage.training.changes import MADE
from hpstage.training.pickles import REMEDY, pickles_in

_STATE = "the state"
Step = Callable[[int, Mapping[str, Scalar], bool], None]
_FORK_AFTER = 2
"""Number of steps before the fork, if there are enough: by then optimizers have their state."""
_STEPS, _SLOW = 2, 10.0
"""Number of steps trained twice; only one if it takes longer than this many seconds."""


class ForkVerification:
    """Follows training and repeats some of its steps once; must be notified of each trained step.

    Args:
        trainable: the trainable, at step ``begun``.
        initial: the values at step 0.
        train: trains a step under given values; its last argument is whether a report is wanted.
        begun: the step at which verification starts.
        length: how many steps follow under these values.
        developed: whether steps were trained since training started or a state was loaded, so that anything they keep
            outside the state exists.
        at_once: whether the fork is at step ``begun`` rather than some steps later.
    """

    def __init__(
        self,
        trainable: Trainable,
        initial: Mapping[str, Scalar],
        train: Step,
        begun: int,
        length: int,
        *,
        developed: bool = False,
        at_once: bool = False,
    ) -> None:
        self._trainable = trainable
        self._initial = dict(initial)
        self._train = train
        least = 0 if developed else 1
        self.fork = begun if at_once else begun + min(_FORK_AFTER, max(length - _STEPS, least))
        self._steps = max(1, min(_STEPS, begun + length - self.fork))
        self.answered = bool(getattr(trainable, "answers_for_state", False))
        """Whether the user defines what the state is."""
        self.seconds = 0.0
        self.steps = 0
        self.difference: Difference | None = None
        self.by_measuring = False
        """Whether the difference is between steps with and without a report."""
        self.pickle: str | None = None
        """Path in the state of a pickle whose bytes differ, if nothing else does."""
        self.refusal: str | None = None
        """Why no state can be taken, if so; the reason applies to every trial."""
        self.over = False
        self._told = begun - 1
        self._changed: frozenset[str] = frozenset()
        self._state: object = None
        self._at_fork: dict[str, str] = {}
        self._trained: list[tuple[int, dict[str, Scalar], bool]] = []
        self._began = time.perf_counter()
        if self.fork == begun:
            self._fork()

    def after(self, step: int, hp: Mapping[str, Scalar], report: bool, *, last: bool = False) -> None:
        """Record that ``step`` was trained under ``hp``, with or without a ``report``. No step follows the ``last``.

        Raises:
            StateError: a state cannot be loaded.
        """
        if step <= self._told or step + 1 < self.fork or self.over:
            return
        self._told = step
        began = time.perf_counter()
        if step + 1 == self.fork:
            self._fork()
        else:
            self._trained.append((step, dict(hp), report))
            if last or len(self._trained) == self._steps or began - self._began > _SLOW:
                self._compare()
                self.over = True
        self.seconds += time.perf_counter() - began
        self._began = time.perf_counter()

    def beyond(self, hp: Mapping[str, Scalar]) -> None:
        """Train past the end of training, under ``hp``, since no step is left. Code may know where training ends and
        fail there; then :attr:`over` stays false."""
        if self.over:
            return
        began = time.perf_counter()
        steps = range(self.fork, self.fork + self._steps)
        try:
            for step in steps:
                self._train(step, hp, False)
        except Exception:
            self.seconds += time.perf_counter() - began
            return
        self._trained = [(step, dict(hp), False) for step in steps]
        self._compare()
        self.over = True
        self.seconds += time.perf_counter() - began

    @property
    def told(self) -> str | None:
        """The result with its remedy; ``None`` if the fork is exact."""
        return self.refusal if self.difference is None else _explained(self, self.difference)

    def _fork(self) -> None:
        """Take the state that a fork would start from."""
        try:
            self._state = reread(self._trainable.state_dict())
            self._at_fork = portrait_of(self._trainable)
            if hasattr(self._trainable, "unverified"):
                self._changed = self._trainable.unverified()
        except StateError as error:
            self.refusal, self.over = str(error), True

    def _compare(self) -> None:
        straight = portrait_of(self._trainable)
        metrics = _metrics(self._trainable) if self.answered else {}
        pickles = dict(pickles_in(self._trainable.state_dict()))
        close = getattr(self._trainable, "close", None)
        if close is not None:
            close()  # as a fresh process would
        self.steps = len(self._trained)
        self._load()
        loaded = {path for path, _, _ in differences(self._at_fork, portrait_of(self._trainable))}
        try:
            for step, hp, report in self._trained:
                self._train(step, hp, report)
        except StateError:
            raise
        except Exception as error:
            self.refusal = (
                f"step {step}, which was trained before, cannot be trained once more from a kept state, as it would "
                f"be if a worker were lost: {type(error).__name__}: {error}. Let a step leave nothing behind that the "
                f"same step cannot start from, or state it in state_dict()"
            )
            return
        forked = portrait_of(self._trainable)
        find = partial(
            first_difference,
            straight,
            forked,
            suspected={path.removesuffix(MADE) for path in self._changed},
            from_the_start=loaded,
        )
        self.difference = find(answered=self.answered)
        unset = None if self.difference is not None else find()
        if unset is not None and not _measures_alike(self._trainable, metrics):
            self.difference = unset
        if self.difference is not None and self.difference[0] == _STATE and pickles:
            now = dict(pickles_in(self._trainable.state_dict()))
            self.pickle = next((path for path, content in pickles.items() if now.get(path) != content), None)
        if self.difference is None and hasattr(self._trainable, "announce"):
            self._compare_measuring(straight)
        if self.difference is None and hasattr(self._trainable, "verified"):
            self._trainable.verified(self._changed)
        self._state = None

    def _compare_measuring(self, straight: dict[str, str]) -> None:
        """Compare with and without a report: code may measure on request, at other steps in a tree than in a trial
        alone."""
        self._load()
        (step, hp, report), *others = self._trained
        self._train(step, hp, not report)
        for step, hp, report in others:
            self._train(step, hp, report)
        self.difference = first_difference(_but_locals(straight), _but_locals(portrait_of(self._trainable)))
        self.by_measuring = self.difference is not None

    def _load(self) -> None:
        self._trainable.setup(self._initial)
        self._trainable.load_state_dict(reread(self._state))


def _metrics(trainable: Trainable) -> dict[str, str]:
    """Return the metrics; none if the trainable cannot be evaluated at this step."""
    try:
        return {name: repr(value) for name, value in checked_metrics(trainable.evaluate()).items()}
    except StateError:
        raise
    except Exception:
        return {}


def _measures_alike(trainable: Trainable, expected: Mapping[str, str]) -> bool:
    """Whether the metrics are as expected, except those that are never the same, such as durations."""
    metrics, again = _metrics(trainable), _metrics(trainable)
    return all(metrics.get(name) == value or metrics.get(name) != again.get(name) for name, value in expected.items())


def _but_locals(portrait: dict[str, str]) -> dict[str, str]:
    """Remove the holders of measurements: local variables, and the state as a whole."""
    return {p: text for p, text in portrait.items() if LOCAL not in p and LOCAL not in text and p != _STATE}


def portrait_of(trainable: Trainable) -> dict[str, str]:
    """Return everything by which two runs of a trainable are compared: its state, and what else it reports."""
    portrait: Callable[[], dict[str, str]] | None = getattr(trainable, "portrait", None)
    told = {} if portrait is None else portrait()
    return {**told, _STATE: digest(trainable.state_dict())}


def _explained(verification: ForkVerification, difference: Difference) -> str:
    """Describe a difference and its remedy."""
    steps = verification.steps
    if verification.pickle is not None:
        return (
            f"{verification.pickle} is pickled, and its bytes after {steps} more steps from a kept state are not those "
            f"of training straight through, though all else that training can reach is the same: {REMEDY}"
        )
    path, straight, forked = shown(difference[0]), *difference[1:]
    remedy = (
        "give it in state_dict() and put it back in load_state_dict()"
        if verification.answered
        else "keep it on the trainable or attach it"
    )
    if verification.by_measuring:
        return (
            f"measuring changes training: {path} is {straight} after {steps} steps, and {forked} where one asks "
            f"for a report and did not before, or does not and did. What is done only where run.wants_report is true "
            f"must leave all as it was: call model.eval() before it and model.train() after it; what is noted there "
            f"and training does not depend on is named in `stateless`"
        )
    return (
        f"training continues differently from a kept state than straight through: after {steps} more steps {path} is "
        f"{forked} from the state and {straight} straight through. Something that training changes is in no state: "
        f"{remedy}, or make it a function of the step; if training does not depend on it, name it in `stateless`"
    )
