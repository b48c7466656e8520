"""Messages to the user about what workers have noticed in training."""

from __future__ import annotations

from collections.abc import Iterator

from hpstage.plan.facts import ForkVerified
from hpstage.plan.messages import BoundaryReached, Noticed, Report
from hpstage.plan.plan import SearchPlan


class Notices:
    """Returns each notice once, whichever workers and trials it comes from."""

    def __init__(self, plan: SearchPlan) -> None:
        self._plan = plan
        self._logged: set[str] = set()

    def of(self, report: Report) -> Iterator[str]:
        """Yield the notices of a report that are new."""
        if isinstance(report, ForkVerified):
            node, noticed = report.node, [Noticed(report.remark)] if report.remark else []
        elif isinstance(report, BoundaryReached):
            node, noticed = report.reached.node, list(report.noticed)
        else:
            return
        for notice in noticed:
            trial = self._plan.nodes[node].maker
            text = notice.text
            if notice.ends_at is not None:
                text = _of_length(trial.steps, notice.text, notice.ends_at, sizes=notice.sizes)
            cause = "length" if notice.ends_at is not None else text
            if text and cause not in self._logged:
                self._logged.add(cause)
                yield f"Trial {trial.id.rpartition('/')[2]}: {text}"


def _of_length(steps: int, trainer: str, ends_at: int, *, sizes: bool) -> str:
    """Compare the length of a trial with where its trainer ends training."""
    if steps > ends_at:
        what = f"it has {steps} steps, but {trainer} ends training after {ends_at}"
    elif steps < ends_at and sizes:
        what = (
            f"it has {steps} steps, but code sizes a schedule by {trainer}, which are {ends_at} steps: it does not "
            f"come to its end"
        )
    else:
        return ""
    return (
        f"{what}. State one length in both, or let the space set how the rate changes (s.onecycle, s.cosine, s.linear)"
    )
