"""An audit: training a trial again in a fresh process, and comparing it with what a plan or a certificate knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from hpstage.checkpoints import CheckpointStore
from hpstage.cluster.fresh import FreshProcess
from hpstage.cluster.messages import Load
from hpstage.cluster.shipping import pack
from hpstage.errors.text import count_of
from hpstage.execution.retraining import Problem, Retrained
from hpstage.executor import Environment
from hpstage.plan.devices import are_any
from hpstage.plan.messages import Segment
from hpstage.plan.same_workload import differing
from hpstage.training.identity.code_identity import by_name, code_identity, packages
from hpstage.training.identity.environment import candidates, described_by, is_open

_LOOK = 0.2
"""Seconds between two calls of ``waiting``."""


def audit(
    trainable: object,
    segment: Segment,
    checkpoints: CheckpointStore,
    described: Mapping[str, str],
    loaded: Mapping[str, str],
    *,
    script: dict[str, str] | None = None,
    waiting: Callable[[], bool] = lambda: True,
) -> Retrained:
    """Train a segment again in a fresh process of this host, and compare.

    Args:
        trainable: the trainable that was searched.
        checkpoints: the store with the states to compare with.
        described, loaded: the workload of the segment and the digests of its code by name, as the plan records them.
        script: see :class:`~hpstage.cluster.messages.Load`.
        waiting: called every 0.2 s; once it returns false, the process is ended.

    Raises:
        UsageError: the trainable cannot be sent to another process.
    """
    process = FreshProcess(Load(pack(trainable, packages(trainable)), script or {}))
    try:
        environment = process.described()
        if environment is not None:
            numerics, differs = _numerics_of(trainable, environment, described, loaded)
            if differs:
                return Retrained(steps=0, seconds=0.0, problem=Problem("refused", differs, 0))
            process.start(replace(segment, numerics=numerics), checkpoints)
        while (found := process.wait(_LOOK)) is None and waiting():
            pass
        if found is None:
            process.kill()
            found = process.poll()
        assert found is not None, "what was ended has an outcome"
        return found
    finally:
        process.kill()


def outcome_text(segment: Segment, found: Retrained, trial: str) -> str:
    """Describe the outcome of auditing a whole trial, in one sentence or two."""
    if found.apart is not None:
        return (
            f"trial {trial} was trained again alone, from scratch, in a fresh process, and differs: {found.apart}. "
            f"Before, it was trained as a part of the search. Something that training depends on is in no state, or is "
            f"no function of the step: run `hpstage check` on the trainable to find it"
        )
    if found.problem is not None:
        after = f" after {count_of(found.problem.step, 'step')}" if found.problem.step else ""
        return f"trial {trial} could not be trained again alone{after}: {found.problem.text}"
    compared = [count_of(found.metrics, "metric")] * bool(found.metrics) + [count_of(found.states, "state")]
    missing = "" if found.states or not segment.compared else ", since none can be read any more"
    return (
        f"trial {trial} was trained again alone, {count_of(found.steps, 'step')} from scratch in a fresh process, in "
        f"{found.seconds:.1f} s: {' and '.join(compared)} compared{missing}, 0 differences"
    )


def _numerics_of(
    trainable: object, environment: Environment, described: Mapping[str, str], loaded: Mapping[str, str]
) -> tuple[str, str]:
    """Return the step backend that a plan's description names, if the trainable leaves it open; and a text on how the
    workload here differs from the description, with the remedy, which is empty if they are equal."""
    if are_any(described):
        return "", "environment='any' has mixed devices that compute different bits: nothing can be compared"
    identity = environment.identity or code_identity(trainable)
    here = described_by(environment, identity, sharing=described.get("sharing") != "off")
    choices = candidates(here) if is_open(here) else {"": here}
    for name, choice in choices.items():
        if choice == described:
            return name, ""
    here = next(iter(choices.values()), here)
    changes = differing(described, loaded, here, by_name(environment.loaded))
    names = {name for name in {*described, *here} if described.get(name) != here.get(name)}
    edited = changes[0].startswith("edited since")
    if "attributes" in names and not edited:
        remedy = "name an object with the attributes of the one that was searched, such as path/to/script.py:OBJECT"
    elif names <= {"trainable", "code", "attributes"} and not changes[0].startswith("package "):
        remedy = "undo the edit, or name a copy of the code as it was: path/to/copy.py:NAME"
    elif any("data" in name or name == "environment:files" for name in names):
        remedy = "give the data that it was trained with"
    else:
        remedy = "use an environment like the one that it was trained in"
    return "", f"this is not the workload that was trained ({'; '.join(changes)}); {remedy}"
