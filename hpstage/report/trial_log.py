"""The log of a trial, joined from the logs of its stages."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpstage.accounting.tables import Table
from hpstage.checkpoints.stage_log import StageLog
from hpstage.checkpoints.store import CheckpointStore
from hpstage.errors import CheckpointCorrupt, CheckpointMissing
from hpstage.plan.facts import NodeId, StateKey
from hpstage.plan.nodes import Node, PlannedTrial
from hpstage.plan.plan import SearchPlan

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger("hpstage")


@dataclass(frozen=True, slots=True)
class TrialLog:
    """The log of a trial: logged values and printed output, including stages that were trained for another trial.

    ``values[name][step]`` is the value logged under a name in a step, counted from 0. ``output`` is the printed output;
    only the end of each stage's output is kept.
    """

    values: Mapping[str, Mapping[int, float]]
    output: str

    def table(self) -> Table:
        """Return a table with a row per step with logged values: the column ``step``, and a column for each name. The
        column of values logged under the name "step" is ``step (logged)``."""
        steps = sorted({step for values in self.values.values() for step in values})
        columns = {
            "step (logged)" if name == "step" else name: [values.get(step) for step in steps]
            for name, values in self.values.items()
        }
        return Table({"step": steps, **columns}, {"step": "int64", **dict.fromkeys(columns, "float64")})

    def frame(self) -> pd.DataFrame:
        """Return :meth:`table` as a data frame, by step. Needs pandas."""
        from hpstage.report.frames import frame_of

        return frame_of(self.table()).set_index("step")


def log_of(plan: SearchPlan, checkpoints: CheckpointStore, trial: PlannedTrial) -> TrialLog:
    """Return the log of a trial. Damaged logs of stages are left out."""
    return joined(loaded(checkpoints, log_keys(plan, trial)))


def loaded(checkpoints: CheckpointStore, keys: Iterable[StateKey]) -> list[StageLog]:
    """Return the logs that exist under these keys. Damaged logs are left out, with a warning."""
    logs = []
    for key in keys:
        try:
            logs.append(checkpoints.load_log(key))
        except CheckpointMissing:
            continue  # nothing was logged, or an earlier version trained the stage and kept no log
        except CheckpointCorrupt as error:
            logger.warning("A training log cannot be read and is left out: %s", error)
    return logs


def joined(logs: list[StageLog]) -> TrialLog:
    """Join the logs of successive stages. If several logs have a step, their values are equal, except that some logs
    may be thinned."""
    values: dict[str, dict[int, float]] = {}
    printed: list[str] = []
    done = 0
    for log in sorted(logs, key=lambda log: (log.start, -log.stop)):
        for name, series in log.series.items():
            values.setdefault(name, {}).update(zip(series.steps, series.values, strict=True))
        if log.stop > done and log.output:
            left_out = f"[{log.left_out:,} characters are left out]\n" if log.left_out else ""
            printed.append(left_out + log.output + ("" if log.output.endswith("\n") else "\n"))
        done = max(done, log.stop)
    in_order = {name: dict(sorted(found.items())) for name, found in sorted(values.items())}
    return TrialLog(in_order, "".join(printed))


def log_keys(plan: SearchPlan, trial: PlannedTrial) -> Iterator[StateKey]:
    """Yield the keys under which logs of a trial's stages may exist: the keys of its states, and those of states
    that were not reached because the step before them failed or ended training."""
    broken_off = broken_off_steps(plan)
    for node, start, stop in trial.path_to(trial.requested + 1):
        steps = {step for step in node.states if start < step <= min(stop, trial.requested)}
        steps |= {step + 1 for step in broken_off.get(node.id, ()) if start <= step < stop}
        yield from (plan.key(node, step) for step in sorted(steps))


def node_log_keys(plan: SearchPlan, node: Node, broken_off: Collection[int]) -> list[StateKey]:
    """Return the keys under which logs of a node may exist. ``broken_off``: the node's :func:`broken_off_steps`."""
    return [plan.key(node, step) for step in sorted({*node.states, *(step + 1 for step in broken_off)})]


def all_log_keys(plan: SearchPlan) -> set[StateKey]:
    """Return the keys under which logs of a plan may exist."""
    broken_off = broken_off_steps(plan)
    return {key for node in plan.nodes for key in node_log_keys(plan, node, broken_off.get(node.id, ()))}


def broken_off_steps(plan: SearchPlan) -> dict[NodeId, set[int]]:
    """Return the incomplete steps by node: those that failed, or in which the user's code ended training."""
    found: dict[NodeId, set[int]] = {}
    for failed in plan.failures:
        if not failed.evaluating:
            found.setdefault(failed.node, set()).add(failed.step)
    for ended in plan.endings.ended.values():
        if ended.outcome == "pruned":
            found.setdefault(ended.node, set()).add(ended.step)
    return found
