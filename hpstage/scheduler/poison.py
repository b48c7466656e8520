"""A stage that kills its workers: when that is enough, and the story of its attempts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from hpstage.plan.facts import ChainLost, UserFailure
from hpstage.plan.nodes import Node


def poisoned(node: Node, step: int, losses: Sequence[ChainLost]) -> UserFailure:
    """The failure of a stage whose every worker died, with the story of its attempts."""
    values = ", ".join(f"{name}={value!r}" for name, value in node.hyperparameters(step).items())
    attempts = [
        f"  {datetime.fromtimestamp(lost.at, UTC):%Y-%m-%d %H:%M:%S} UTC: worker {lost.worker} died, "
        f"{lost.seconds:.1f} s after its last sign{': ' + lost.message if lost.message else ''}"
        for lost in losses
    ]
    return UserFailure(
        summary=f"{len(losses)} workers died in a row while training from step {step} ({values})",
        traceback="\n".join(["Each worker that was given this stage died of it, or in it:", *attempts]),
    )
