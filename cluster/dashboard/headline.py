"""The page's sentences: what a study saves, where it stands, and what has failed. Pure."""

from __future__ import annotations

import html

from hpstage.accounting.savings import less_training
from hpstage.cluster.dashboard.board import Shown
from hpstage.cluster.dashboard.feed import failures_on
from hpstage.errors.text import clean, count_of, shortened, time_left
from hpstage.report.names import plain

_FAILURES = 3  # shown; others are counted
_SUMMARY = 160


def headline(shown: Shown, seconds_left: float | None = None) -> list[str]:
    """Return the parts of the sentence at the top of the page, without figures that are not known yet."""
    study, totals = shown.study, shown.study.totals
    found = []
    shared = less_training(totals.steps_asked, totals.steps_unique)
    if shared:
        found.append(shared)
    elif totals.steps_asked:
        found.append(f"nothing shared yet: {totals.steps_asked:,} steps")
    saved = shown.seconds_saved
    if totals.answers and saved > 0:
        found.append(f"{worker_time(saved)} saved")
    finished = len(study.trials) - study.trials_by_end[None]
    of = study.started.n_trials or len(study.trials)
    found.append(f"{finished:,} of {max(of, len(study.trials)):,} trials finished")
    if rejected := study.trials_by_end["REJECTED"]:
        found.append(f"{rejected:,} rejected")
    record = shown.view.plan.searches.get(study.name)
    if record is not None and not study.ended:
        queued = record.queued + max(0, of - len(study.trials))
        states = (("paused", len(record.paused)), ("queued", queued))
        found += [f"{count:,} {state}" for state, count in states if count]
    if seconds_left is not None:
        found.append(time_left(seconds_left))
    best = study.best(1)
    if best:
        found.append(f"best {best[0].value:.5g}")
    return found


def standing(shown: Shown) -> list[str]:
    """Return the line below: the study's name, whether it runs, its algorithm, and what it has spent."""
    study, view = shown.study, shown.view
    if view.problem:
        state = "cannot be followed any more: " + view.problem
    elif study.ended:
        state = "ended"
    else:
        state = "running" if view.is_driven(study.name) else "interrupted"
    totals = study.totals
    trained = f"{totals.steps_trained:,} steps trained in {worker_time(totals.worker_seconds)}"
    found = [plain(study.name), state, clean(study.started.algorithm), trained]
    audits = view.audits.line(view.plan)
    return [*found, f"audited {audits}"] if audits else found


def failures(shown: Shown) -> list[str]:
    """Return the study's failures, the latest first, each on one line."""
    facts = list(failures_on(shown.view, shown.study))
    shown_once = dict.fromkeys(
        f"{'evaluating' if fact.evaluating else 'training'} at step {fact.step:,}: "
        f"{shortened(clean(fact.failure.summary), _SUMMARY)}"
        for fact in reversed(facts[-200:])
    )
    lines = list(shown_once)[:_FAILURES]
    more = len(facts) - len(lines)
    return lines + ([f"and {more:,} more"] if more > 0 and lines else [])


def worker_time(seconds: float) -> str:
    """Format worker-seconds in the unit that suits."""
    for unit, length in (("hours", 3600.0), ("minutes", 60.0)):
        if abs(seconds) >= 2 * length:
            return f"{seconds / length:,.1f} worker-{unit}"
    return f"{round(seconds, 1) + 0.0:.1f} worker-seconds"


def headline_html(shown: Shown, seconds_left: float | None = None) -> str:
    """Return the sentence and the line below as HTML."""
    first = "; ".join(headline(shown, seconds_left))
    return (
        f"<div style='font-size: 18px; font-weight: 600'>{html.escape(first)}</div>"
        f"<div style='opacity: .75'>{html.escape(' · '.join(standing(shown)))}</div>"
    )


def failures_html(shown: Shown) -> str:
    """Return the failures as HTML; ``""`` if there are none."""
    failed, lines = shown.study.trials_by_end["FAIL"], failures(shown)
    if not failed and not lines:
        return ""
    title = f"{count_of(failed, 'trial')} failed" if failed else "Failed"
    rows = "".join(f"<div>{html.escape(line)}</div>" for line in lines)
    return f"<b>{title}</b>{rows}"
