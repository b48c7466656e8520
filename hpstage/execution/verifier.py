"""Chooses the forks that a worker verifies, and when."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from hpstage.checkpoints.on_device import is_out_of_memory
from hpstage.errors import StateError
from hpstage.execution.first_steps import STILL, is_still_by_intent
from hpstage.execution.flight import Flight, Values
from hpstage.execution.outcomes import outcome_of
from hpstage.execution.verification import ForkVerification, Step
from hpstage.plan.facts import ForkVerified, WorkerId
from hpstage.plan.messages import Boundary
from hpstage.schedule import Scalar
from hpstage.trainable import Trainable

logger = logging.getLogger("hpstage")

# Maximum number of further verifications when training changes something new: paths may be generated without end.
_VERIFICATIONS = 8


class Verifier:
    """Verifies forks of the chains that one trainable runs.

    Args:
        train: as for :class:`~hpstage.execution.verification.ForkVerification`.
    """

    def __init__(self, trainable: Trainable, train: Step) -> None:
        self._trainable = trainable
        self._train = train
        self._unverified: Callable[[], frozenset[str]] | None = getattr(trainable, "unverified", None)
        self._left = _VERIFICATIONS
        self._end_is_verified = False

    def enter(self, flight: Flight) -> None:
        """Start verifying the fork at the beginning of a stage, if that is requested."""
        if flight.stage.verify and flight.verification is None and not flight.chain.gang:
            self.begin(flight)

    def begin(self, flight: Flight, *, at_once: bool = False) -> ForkVerification:
        """Start verifying a fork of the running chain."""
        flight.verification = ForkVerification(
            self._trainable,
            flight.chain.initial,
            self._train,
            flight.step,
            flight.stage.stop - flight.step,
            developed=flight.index > 0,
            at_once=at_once,
        )
        return flight.verification

    def is_due(self, flight: Flight, boundary: Boundary | None, *, at_end: bool) -> bool:
        """Whether :meth:`verify` is due at the chain's current step."""
        if flight.verification is not None:
            return at_end or not flight.verification.is_pending()
        # At a boundary, something outside the state may have changed that did not change when verified.
        if boundary is None or not boundary.keep or not flight.chain.verify_new or self._unverified is None:
            return False
        return self._left > 0 and bool(self._unverified())

    def verify(
        self,
        flight: Flight,
        values: Mapping[str, Scalar],
        worker: WorkerId,
        clock: Callable[[], float],
        *,
        at_end: bool,
    ) -> tuple[ForkVerified | None, bool]:
        """Start or continue verifying a fork. Return the result once it is complete, and whether the trainable was
        trained past the chain's end for it."""
        verification = flight.verification
        beyond = at_end
        if verification is None:
            self._left -= 1
            if not self._left:
                logger.warning(
                    "Forks were verified %d times because training changed another object for the first time, most "
                    "recently %s. They are not verified for further objects. List in `stateless` the objects that "
                    "training does not depend on.",
                    _VERIFICATIONS,
                    min(self._unverified()) if self._unverified is not None else "",
                )
            verification = self.begin(flight, at_once=True)
        else:
            verification.after(flight.step - 1, values, flight.announced, last=at_end)
            beyond &= flight.step == verification.fork  # a chain of one step
        if beyond:
            verification.beyond(values)
        if at_end or not verification.is_pending():
            verification.collect(flight.step)
        moved = beyond and verification.in_place
        if not (verification.over or at_end):
            return None, moved
        flight.load_seconds += verification.seconds
        flight.verification = None
        if not verification.over:
            return None, moved
        verified = ForkVerified(
            chain=flight.chain.id,
            worker=worker,
            node=flight.stage.node,
            step=verification.fork,
            steps=verification.steps,
            seconds=verification.seconds,
            at=clock(),
            difference=verification.difference,
            remark=STILL if verification.still and not is_still_by_intent(values) else "",
        )
        return verified, moved

    def is_end_due(self, flight: Flight) -> bool:
        """Whether :meth:`verify_end` is to be called where the user's code has ended training in the current step."""
        return flight.announced and flight.chain.verify_new and not (self._end_is_verified or flight.chain.gang)

    def verify_end(self, flight: Flight, begun: int, step: int) -> None:
        """Repeat the training that ended itself in ``step``, where a report was wanted, without a report there: in a
        stage tree, reports are wanted at other steps than without sharing.

        Args:
            begun: the step of the last saved state, which the trainable is in.

        Raises:
            StateError: training has not ended in this step.
        """
        at = begun
        try:
            for at in range(begun, step + 1):
                values = Values(flight.course.stage_at(at + 1))
                values.move(at)
                self._train(at, values, False)
        except Exception as error:
            if at == step and outcome_of(error) is not None:
                self._end_is_verified = True
                return
            if is_out_of_memory(error):
                raise
        flight.step = step  # the step that has failed, not one after it
        raise StateError(
            f"training ends in step {step} if a report is wanted there, and continues if none is: its last step would "
            f"depend on when the algorithm requests metrics. Decide by a value that every step computes, such as the "
            f"loss, or measure in fixed steps, regardless of run.wants_report"
        )
