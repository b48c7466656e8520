"""What happens when a worker dies in the middle of a chain. Pure.

1. The executor notices it: ``cluster/connection.py`` where a worker's process is gone, ``cluster/site.py`` where only
   its training process is. After all earlier reports of the chain, ``WorkerLeft``, or ``ChainEnded`` with outcome
   ``lost``, comes through ``cluster/membership.py`` and ``cluster/inbox.py``.
2. The driver passes the report to ``Reports`` (``reports.py``), which calls :func:`facts_of_loss`: the chain is closed,
   and training begins again at its last checkpoint. If ``max_losses`` workers in a row (3) have died on the path from
   one state, the stage is assumed to be the cause, and its trials fail.
3. Folding these facts (``Scheduler.fold``, ``Covers.end``) opens the steps that the chain did not reach: its last saved
   state is a ready stage again. ``Dispatch`` assigns it to an idle worker that has no other chains and gets none until
   training is beyond this state, so that no other chain is blamed if that worker dies, too.
4. If no worker is left, the driver waits for another one, and ends the search after ``driver/worker_timeout.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from hpstage.plan.facts import ChainClosed, ChainLost, ChainOutcome, Departure, Fact, StageFailed, UserFailure, WorkerId
from hpstage.plan.nodes import Node
from hpstage.plan.open_chain import OpenChain
from hpstage.plan.plan import SearchPlan


def facts_of_loss(
    plan: SearchPlan,
    chain: OpenChain,
    worker: WorkerId,
    *,
    at: float,
    how: ChainOutcome | Departure,
    message: str,
    max_losses: int,
) -> list[Fact]:
    """Return the facts that follow from the death of a worker during its chain.

    Args:
        at: the time at which it was noticed.
        max_losses: number of consecutive deaths on the path from one state after which its trials fail.
    """
    begins = chain.begins_again
    node, step = plan.nodes[begins.node], begins.step
    lost = ChainLost(
        chain=chain.id,
        worker=worker,
        node=node.id,
        step=step,
        at=at,
        outcome=how,
        seconds=max(0.0, at - chain.since) * len(chain.workers),
        steps=0,
        message=message,
        workers=len(chain.workers),
    )
    facts: list[Fact] = [ChainClosed(chain.id, at), lost]
    if lost.blames:
        losses = [*plan.losses.get(begins, []), lost]
        if len(losses) >= max_losses:
            facts.append(StageFailed(node.id, step, evaluating=False, failure=_failure(node, step, losses)))
    return facts


def _failure(node: Node, step: int, losses: Sequence[ChainLost]) -> UserFailure:
    """Describe the failure of a stage on which every worker died, listing the attempts."""
    values = ", ".join(f"{name}={value!r}" for name, value in node.hyperparameters(step).items())
    attempts = [
        f"  {datetime.fromtimestamp(lost.at, UTC):%Y-%m-%d %H:%M:%S} UTC: worker {lost.worker} died, "
        f"{lost.seconds:.1f} s after its last sign of life{': ' + lost.message if lost.message else ''}"
        for lost in losses
    ]
    return UserFailure(
        summary=f"{len(losses)} workers died in a row while training from step {step} ({values})",
        traceback="\n".join(["Every worker that was given this stage died:", *attempts]),
    )
