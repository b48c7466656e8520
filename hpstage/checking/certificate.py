"""A certificate: all that another machine needs to train a trial again and compare, as JSON."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import msgspec
from msgspec.structs import replace

from hpstage.errors import UsageError
from hpstage.plan.facts import Metrics, PlanCreated, StateKey, TrialAdded, TrialId, to_metrics
from hpstage.plan.messages import Compared, Segment
from hpstage.plan.nodes import PlannedTrial
from hpstage.plan.plan import SearchPlan
from hpstage.plan.segments import segment_of
from hpstage.report.files import replacing
from hpstage.schedule import Schedule

_FORMAT = 1


class State(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of a state: its metrics, and if it was saved, the digest of its content and the marks of its
    leaves."""

    step: int
    digest: str = ""
    marks: str = ""
    metrics: Metrics = {}


class Certificate(msgspec.Struct, frozen=True):
    """A trial as it was trained: ``described`` is the identity of its code and data, and its environment; ``loaded``
    are digests of its code by name."""

    format: int
    hpstage: str
    trial: TrialId
    steps: int
    schedules: dict[str, Schedule]
    described: dict[str, str]
    loaded: dict[str, str]
    states: list[State]

    def segment(self) -> Segment:
        """Return the segment of the whole trial, from step 0. Its states are compared by their digests."""
        plan = SearchPlan(StateKey("certificate"))
        plan.apply(TrialAdded(self.trial, self.schedules, self.steps))
        kept = [state for state in self.states if state.digest]
        return replace(
            segment_of(plan.trials[self.trial].last, self.steps),
            compared=tuple(Compared(state.step, _NOT_HERE, state.digest, state.marks) for state in kept),
            metrics={state.step: state.metrics for state in self.states if state.metrics},
        )


_NOT_HERE = StateKey("0" * 32)
"""The key of a state that is not on this machine."""
_decode = msgspec.json.Decoder(Certificate).decode


def certificate_of(trial: PlannedTrial, header: PlanCreated) -> Certificate:
    """Return the certificate of a trial up to its last result."""
    return Certificate(
        format=_FORMAT,
        hpstage=version("hpstage"),
        trial=trial.id,
        steps=trial.answered,
        schedules={name: schedule.until(trial.answered) for name, schedule in trial.schedules.items()},
        described=header.described,
        loaded=header.loaded,
        states=[
            State(
                state.step,
                state.digest or "",
                "" if state.kept is None else state.kept.marks,
                to_metrics(state.metrics or {}),
            )
            for state in trial.states()
            if state.step <= trial.answered and (state.digest is not None or state.metrics is not None)
        ],
    )


def write(certificate: Certificate, file: Path) -> None:
    """Write a certificate to a file. Raise :class:`UsageError` if it cannot be written."""
    try:
        with replacing(file) as aside:
            Path(aside).write_bytes(msgspec.json.format(msgspec.json.encode(certificate)) + b"\n")
    except OSError as error:
        raise UsageError(
            f"the certificate cannot be written to {file}: {error.strerror or error}; give another file"
        ) from error


def read(file: str | os.PathLike[str]) -> Certificate:
    """Return the certificate in a file. Raise :class:`UsageError` if there is none, or one of another format."""
    try:
        found = _decode(Path(file).read_bytes())
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}; give the file of a certificate") from error
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"{file} is not a certificate ({error}); write one with "
            f"hpstage audit STORE --trial NUMBER --certificate FILE"
        ) from error
    if found.format != _FORMAT:
        raise UsageError(
            f"{file} is a certificate of format {found.format}, and this hpstage reads {_FORMAT}; use hpstage "
            f"{found.hpstage}"
        )
    return found
