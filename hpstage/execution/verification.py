"""Verification of a fork: compares steps trained straight through with steps trained from the state a fork would load.

The comparison covers all that training can reach, not only weights, to find a hidden counter before it has an effect.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import msgspec

from hpstage.checkpoints.host_memory import HostMemory
from hpstage.checkpoints.on_device import is_out_of_memory
from hpstage.checkpoints.state_tree import digest, flatten, nbytes, reread
from hpstage.errors import StateError
from hpstage.errors.text import count_of
from hpstage.execution.fork import Fork, obstacle
from hpstage.schedule import Scalar
from hpstage.trainable import Trainable, close
from hpstage.training.adapter import checked_metrics
from hpstage.training.capture.portrait import GENERATOR, Difference, by_likely_cause, differences, follows, shown
from hpstage.training.capture.stateless import LOCAL, MOST, excluding, stated_on
from hpstage.training.changes import MADE
from hpstage.training.pickles import REMEDY, pickles_in

logger = logging.getLogger("hpstage")

MEASURING = (
    "Code that runs only if run.wants_report is true must not change what training reads: call model.eval() before it "
    "and model.train() after it, and let training depend on values that every step computes, not on measurements. "
    "Name records that it keeps, and that training does not read, in `stateless`"
)
_SEED = (
    ". A random generator that is made without a seed starts at random: seed it where it is made (default_rng(0)). "
    "Seed an environment of gymnasium that is unseeded, vectorized or not, by reset(seed=0), and its spaces by "
    "action_space.seed(0) and observation_space.seed(0)"
)
_STATE = "the state"
Step = Callable[[int, Mapping[str, Scalar], bool], None]
_FORK_AFTER = 2
"""Number of steps before the fork, if there are enough: by then optimizers have their state."""
_STEPS, _SLOW = 2, 10.0
"""Number of steps trained twice; only one if it takes longer than this many seconds."""
_BRIEF = 2.0
"""Seconds that training waits for the result, so that an error in very short steps is noticed at once."""
_PATIENCE, _TIMES = 60.0, 2.0
"""Seconds to wait for a fork's answer: _PATIENCE, plus _TIMES times the seconds that it already had during training."""


class Outcome(msgspec.Struct):
    """The result of a comparison.

    ``over``: false if steps beyond the end of training could not be trained. ``differences``: likely causes first,
    without their consequences. ``by_measuring``: whether the differences are between steps with and without a report.
    ``pickle``: the path in the state of a pickle whose bytes differ, if nothing else does. ``refusal``: why no state
    can be taken or loaded, or no step can be trained from it, if so; the reason applies to every trial.
    """

    over: bool = True
    differences: list[Difference] = []
    by_measuring: bool = False
    pickle: str | None = None
    refusal: str | None = None


_decode = msgspec.msgpack.Decoder(Outcome).decode


class ForkVerification:
    """The verification of one fork: follows training and repeats some of its steps once. Must be notified of each step.

    The steps are repeated in a fork of this process, which does not affect it, while training continues. If this
    process cannot be forked, they are repeated here, and the state is restored.

    Args:
        trainable: the trainable, at step ``begun``.
        initial: the values at step 0.
        train: trains a step under given values; its last argument is whether a report is wanted.
        begun: the step at which verification starts.
        length: number of steps that follow under these values.
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
        self.subject = getattr(trainable, "subject", trainable)
        self.answered = bool(getattr(trainable, "answers_for_state", False))
        """Whether the user defines what the state is."""
        self.seconds = 0.0
        self.steps = 0
        self.outcome = Outcome(over=False)
        self._comparing: Fork | None = None
        self._notified = begun - 1
        self._changed: frozenset[str] = frozenset()
        self._state: object = None
        self._at_fork: dict[str, str] = {}
        self._trained: list[tuple[int, dict[str, Scalar], bool]] = []
        self._straight: dict[str, str] = {}
        self._pickles: dict[str, bytes] = {}
        self._compared_by: Callable[[], Outcome] = self._compared
        self.in_place = False
        """Whether the comparison ran in this process."""
        self.still = False
        """Whether the steps have changed nothing that training can reach, though the user's state has arrays."""
        self._began = time.perf_counter()
        if self.fork == begun:
            self._take()

    def after(self, step: int, hp: Mapping[str, Scalar], report: bool, *, last: bool = False) -> None:
        """Record that ``step`` was trained under ``hp``, with or without a ``report``. No step follows the ``last``.

        Raises:
            StateError: a state cannot be captured.
        """
        if step <= self._notified or step + 1 < self.fork or self.over or self._comparing is not None:
            return
        self._notified = step
        began = time.perf_counter()
        if step + 1 == self.fork:
            self._take()
        else:
            self._trained.append((step, dict(hp), report))
            if last or len(self._trained) == self._steps or began - self._began > _SLOW:
                self._see_straight()
                self._begin(self._compared)
        self.seconds += time.perf_counter() - began
        self._began = time.perf_counter()

    def beyond(self, hp: Mapping[str, Scalar]) -> None:
        """Train steps past the end of training, under ``hp``, since no other step is left. The user's code may fail
        there because it knows where training ends; then :attr:`over` stays false."""
        if self.over:
            return
        began = time.perf_counter()
        self._trained = [(step, dict(hp), False) for step in range(self.fork, self.fork + self._steps)]
        in_a_thread = hasattr(self._trainable, "in_a_thread")  # a fork lacks the thread
        self._begin(self._trained_beyond, in_place=in_a_thread)
        self.collect(self.fork)
        self.seconds += time.perf_counter() - began

    @property
    def held_bytes(self) -> int:
        """Bytes of the state that is held for the comparison."""
        return 0 if self._state is None else nbytes(self._state)

    @property
    def over(self) -> bool:
        return self.outcome.over

    def is_pending(self) -> bool:
        """Whether the fork has not answered yet. Does not block."""
        if self._comparing is None:
            return False
        try:
            return self._comparing.wait() is None
        except ChildProcessError:
            return False

    def collect(self, step: int) -> None:
        """Wait for the comparing fork, if there is one, and adopt its result.

        Args:
            step: number of steps trained so far.
        """
        fork, began = self._comparing, time.perf_counter()
        if fork is None:
            return
        answer = None
        with suppress(ChildProcessError):
            answer = fork.wait(_PATIENCE + _TIMES * (began - self._begun))
        fork.close(kill=True)
        self._comparing = None
        if answer is not None:
            self._take_over(_decode(answer))
        else:  # code of the user's, or of a library, depends on a thread or a process that forks lack
            logger.info("a fork of training could not be verified in a fork of this process; it is verified in place")
            self._compare_in_place(moved_on=step > self.fork + self.steps)
        self.seconds += time.perf_counter() - began

    def close(self) -> None:
        """End the comparison that is running."""
        if self._comparing is not None:
            self._comparing.close(kill=True)
            self._comparing = None

    @property
    def difference(self) -> str | None:
        """The result with its remedy; ``None`` if the fork is exact."""
        found = self.outcome
        return _explained(found, self) if found.differences else found.refusal

    def _take(self) -> None:
        """Take the state that a fork would start from."""
        try:
            self._state = reread(self._trainable.state_dict())
            self._at_fork = portrait_of(self._trainable)
            if hasattr(self._trainable, "unverified"):
                self._changed = self._trainable.unverified()
        except StateError as error:
            self.outcome = Outcome(refusal=str(error))

    def _begin(self, compared: Callable[[], Outcome], *, in_place: bool = False) -> None:
        """Compare in a fork, or in this process."""
        self.steps = len(self._trained)
        self._compared_by = compared
        why = "its function runs in a thread of its own" if in_place else obstacle(self._trainable)
        if not why and not HostMemory().has_room(nbytes(self._state)):
            why = "memory has no room for what a fork changes"
        if not why:
            try:
                self._comparing = Fork(lambda: msgspec.msgpack.encode(compared()))
                self._begun = time.perf_counter()
                with suppress(ChildProcessError):
                    self._comparing.wait(_BRIEF)
            except OSError as error:
                why = str(error)
        if why:
            logger.debug("a fork of training is verified in this process: %s", why)
            self._compare_in_place()

    def _compare_in_place(self, *, moved_on: bool = False) -> None:
        present = reread(self._trainable.state_dict()) if moved_on else None
        self._take_over(self._compared_by())
        self.in_place = True
        if present is not None:
            self._trainable.setup(self._initial)
            self._trainable.load_state_dict(present)

    def _take_over(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._state = None
        if outcome.over and not outcome.differences and hasattr(self._trainable, "verified"):
            self._trainable.verified(self._changed)

    def _trained_beyond(self) -> Outcome:
        try:
            for step, hp, report in self._trained:
                self._train(step, hp, report)
        except Exception:
            return Outcome(over=False)
        self._see_straight()
        return self._compared()

    def _see_straight(self) -> None:
        """Record the result of training straight through. Not in a fork, which lacks the threads of functions."""
        self._straight = portrait_of(self._trainable)
        self._pickles = dict(pickles_in(self._trainable.state_dict()))
        if self.answered and not any(differences(self._at_fork, self._straight)):
            self.still = any(leaf.nbytes for leaf in flatten(self._state).leaves)

    def _compared(self) -> Outcome:
        """Train the steps again from the state, and compare."""
        straight, pickles = self._straight, self._pickles
        metrics = _metrics(self._trainable) if self.answered else {}
        close(self._trainable)  # to begin as in a fresh process
        measuring = hasattr(self._trainable, "announce")
        try:
            self._load(again=measuring)
            loaded = {path for path, _, _ in differences(self._at_fork, portrait_of(self._trainable))}
        except Exception as error:
            if is_out_of_memory(error):
                raise  # no evidence about the state
            return Outcome(refusal=_refusal("the saved state cannot be loaded", error))
        try:
            for step, hp, report in self._trained:
                self._train(step, hp, report)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return Outcome(
                refusal=_refusal(
                    f"step {step}, which was trained before, cannot be trained once more from a saved state, as it "
                    f"would be if a worker were lost",
                    error,
                )
            )
        find = partial(
            by_likely_cause,
            straight,
            portrait_of(self._trainable),
            suspected={path.removesuffix(MADE) for path in self._changed},
            from_the_start=loaded,
        )
        different = find(answered=self.answered)
        if not different and (unset := find()) and not _measures_equally(self._trainable, metrics):
            different = unset
        found = Outcome(differences=_causes(different))
        if different and different[0][0] == _STATE and pickles:
            now = dict(pickles_in(self._trainable.state_dict()))
            found.pickle = next((path for path, content in pickles.items() if now.get(path) != content), None)
        if not different and measuring:
            self._compare_measuring(found)
        return found

    def _compare_measuring(self, found: Outcome) -> None:
        """Compare steps with and without a report: code may measure only if a report is wanted, which happens at other
        steps in a stage tree than without sharing."""
        self._load()
        (step, hp, report), *others = self._trained
        self._train(step, hp, not report)
        for step, hp, report in others:
            self._train(step, hp, report)
        now = portrait_of(self._trainable)
        found.differences = _causes(by_likely_cause(_but_locals(self._straight), _but_locals(now)))
        found.by_measuring = bool(found.differences)

    def _load(self, *, again: bool = False) -> None:
        """Load the state. It is copied if it will be loaded ``again``, since a trainable may keep what it loads."""
        self._trainable.setup(self._initial)
        self._trainable.load_state_dict(reread(self._state) if again else self._state)


def _refusal(what: str, error: Exception) -> str:
    """Describe an unexpected error. A :class:`StateError` keeps its text."""
    if isinstance(error, StateError):
        return str(error)
    return (
        f"{what}: {type(error).__name__}: {error}. A step must be repeatable after it was trained, and "
        f"load_state_dict() must restore what state_dict() returns"
    )


def _metrics(trainable: Trainable) -> dict[str, str]:
    """Return the metrics; none if the trainable cannot be evaluated at this step."""
    try:
        return {name: repr(value) for name, value in checked_metrics(trainable.evaluate()).items()}
    except StateError:
        raise
    except Exception:
        return {}


def _measures_equally(trainable: Trainable, expected: Mapping[str, str]) -> bool:
    """Whether the metrics are as expected, except those that never repeat, such as durations."""
    metrics, again = _metrics(trainable), _metrics(trainable)
    return all(metrics.get(name) == value or metrics.get(name) != again.get(name) for name, value in expected.items())


def _but_locals(portrait: dict[str, str]) -> dict[str, str]:
    """Remove the entries that may hold measurements: local variables, and the state as a whole."""
    return {p: text for p, text in portrait.items() if LOCAL not in p and LOCAL not in text and p != _STATE}


def portrait_of(trainable: Trainable) -> dict[str, str]:
    """Return everything by which two runs of a trainable are compared: its state, and what else it reports."""
    portrait: Callable[[], dict[str, str]] | None = getattr(trainable, "portrait", None)
    reported = {} if portrait is None else portrait()
    return {**reported, _STATE: digest(trainable.state_dict())}


def _causes(differences: list[Difference]) -> list[Difference]:
    return [*differences[:1], *(other for other in differences[1:] if not follows(other))]


def _explained(found: Outcome, verification: ForkVerification) -> str:
    """Describe all that differs and the remedy."""
    steps = verification.steps
    if found.pickle is not None:
        return (
            f"{found.pickle} is pickled, and its bytes after {count_of(steps, 'more step')} from a saved state are not "
            f"those of training straight through, though everything else that training can reach is equal: {REMEDY}"
        )
    (first, straight, forked), *others = found.differences
    path = shown(first)
    causes = [first, *(other for other, _, _ in others)]
    named = [one[0] for one in found.differences if not follows(one) and one[0] != _STATE]
    with stated_on(verification.subject):
        unless = f"; {excluding(*named)}" if named else ""
    also = ""
    if len(causes) > 1:
        more = f" and {len(causes) - MOST:,} more" if len(causes) > MOST else ""
        also = f"; other differences: {', '.join(map(shown, causes[1:MOST]))}{more}"
    remedy = (
        "return it from state_dict() and restore it in load_state_dict()"
        if verification.answered
        else "keep it on the trainable or attach it"
    )
    if found.by_measuring:
        return (
            f"measuring changes training: {path} is {straight} after {count_of(steps, 'step')}, and {forked} if a "
            f"report is added to these steps, or omitted. {MEASURING}"
        )
    seed = _SEED if any(text.startswith(GENERATOR) for _, text, _ in found.differences) else ""
    return (
        f"training from a saved state differs from training straight through: after {count_of(steps, 'more step')} "
        f"{path} is {forked} from the state and {straight} straight through{also}. Something that training changes is "
        f"in no state: {remedy}, or make it a function of the step{unless}. Or a step depends on something that never "
        f"repeats, such as the time or the system's random numbers{seed}"
    )
