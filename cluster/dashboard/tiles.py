"""The tiles at the top of the page: the study's progress, its savings and its failures. Pure."""

from __future__ import annotations

import html
import time
from dataclasses import dataclass

from hpstage.accounting.savings import skipped_work
from hpstage.cluster.dashboard.board import Shown
from hpstage.cluster.dashboard.feed import failures_on
from hpstage.errors.text import clean, count_of, duration, rate, shortened, time_left
from hpstage.report.names import plain

_FAILURES = 3  # maximum number of failures shown; others are counted
_SUMMARY = 160  # maximum number of characters of an exception
_PARAMETERS = 160  # maximum number of characters of all parameters
_GRID = (
    "display: grid; gap: 8px; margin-bottom: 6px; grid-auto-flow: dense; "
    "grid-template-columns: repeat(auto-fit, minmax(150px, 1fr))"
)
_TILE = "border: 1px solid rgba(128, 128, 128, .35); border-radius: 6px; padding: 6px 10px; overflow-wrap: anywhere"
_WIDE = "; grid-column: span 2"


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure with its title and details."""

    title: str
    figure: str
    details: tuple[str, ...]
    wide: bool = False
    """Twice as wide as the others."""


def tiles(shown: Shown, seconds_left: float | None = None) -> list[Tile]:
    """Return the tiles of a study whose figures are known."""
    found = [_finished(shown), _best(shown), _merge_rate(shown), _time(shown, seconds_left), _workers(shown)]
    return [tile for tile in found if tile is not None]


def _finished(shown: Shown) -> Tile:
    study = shown.study
    finished, known = len(study.trials) - study.trials_by_end[None], len(study.trials)
    of = study.started.n_trials or known
    counts = [("failed", study.trials_by_end["FAIL"]), ("rejected", study.trials_by_end["REJECTED"])]
    record = shown.view.plan.searches.get(study.name)
    if record is not None and not study.ended:
        counts += [("paused", len(record.paused)), ("queued", record.queued + max(0, of - known))]
    details = tuple(f"{count:,} {state}" for state, count in counts if count)
    return Tile("trials finished", f"{finished:,} of {max(of, known):,}", details)


def _best(shown: Shown) -> Tile | None:
    study, plan = shown.study, shown.view.plan
    best = study.standings.best(1)
    if not best:
        return None
    trial = best[0].trial
    proposed = plan.searches.proposed.get(trial)
    params = {} if proposed is None else proposed.params
    named = ", ".join(f"{plain(name)}={_value(value)}" for name, value in params.items())
    number = f"trial {plain(trial.rpartition('/')[2])} at step {best[0].step:,}"
    details = (number, *([shortened(named, _PARAMETERS)] if named else []))
    return Tile(f"best {plain(study.started.metric[0])}", f"{best[0].value:.5g}", details, wide=True)


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else plain(str(value))


def _merge_rate(shown: Shown) -> Tile | None:
    totals = shown.study.totals
    if not totals.steps_asked:
        return None
    shared = totals.steps_unique < totals.steps_asked
    saved = shown.seconds_saved
    details = [
        f"{totals.steps_unique:,} unique of {totals.steps_asked:,}" if shared else f"{totals.steps_asked:,} steps",
        f"{totals.steps_trained:,} steps trained",
        f"{count_of(totals.stages_done, 'stage')} done",
        *([f"{duration(saved)} of worker time saved"] if totals.answers and saved > 0 else []),
    ]
    return Tile("merge rate", f"{rate(totals.merge_rate)}×" if shared else "nothing shared yet", tuple(details))


def _time(shown: Shown, seconds_left: float | None) -> Tile | None:
    study = shown.study
    runs = not study.ended and shown.view.is_driven(study.name)
    elapsed = time.time() - study.began if runs else study.history.points[-1][0]
    if elapsed <= 0:
        return None
    return Tile("elapsed", duration(elapsed), () if seconds_left is None else (time_left(seconds_left),))


def _workers(shown: Shown) -> Tile:
    training = len(shown.view.workers().get(shown.study.name, ()))
    return Tile("workers", f"{training:,} training", (f"{duration(shown.study.totals.worker_seconds)} of worker time",))


def standing(shown: Shown) -> list[str]:
    """Return the parts of the line below the tiles: the study's name, its state, its algorithm, the skipped work of
    frozen layers, and audits."""
    study, view = shown.study, shown.view
    if view.problem:
        state = "cannot be shown any more: " + view.problem
    elif study.ended:
        state = "ended"
    else:
        state = "running" if view.is_driven(study.name) else "interrupted"
    found = [plain(study.name), state, clean(study.started.algorithm)]
    totals = study.totals
    if skipped := skipped_work(totals.frozen_batches, totals.frozen_skipped, totals.frozen_seconds):
        found.append(f"frozen layers skipped: {skipped}")
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


def summary_html(shown: Shown, seconds_left: float | None = None) -> str:
    found = "".join(_html(tile) for tile in tiles(shown, seconds_left))
    return (
        f"<div style='{_GRID}'>{found}</div><div style='opacity: .75'>{html.escape(' · '.join(standing(shown)))}</div>"
    )


def _html(tile: Tile) -> str:
    details = "".join(f"<div style='opacity: .75'>{html.escape(detail)}</div>" for detail in tile.details)
    title, figure = html.escape(tile.title), html.escape(tile.figure)
    return (
        f"<div style='{_TILE}{_WIDE if tile.wide else ''}'><div style='opacity: .75'>{title}</div>"
        f"<div style='font-size: 18px; font-weight: 600'>{figure}</div>{details}</div>"
    )


def failures_html(shown: Shown) -> str:
    """Return the failures as HTML; ``""`` if there are none."""
    failed, lines = shown.study.trials_by_end["FAIL"], failures(shown)
    if not failed and not lines:
        return ""
    title = f"{count_of(failed, 'trial')} failed" if failed else "Failed"
    rows = "".join(f"<div>{html.escape(line)}</div>" for line in lines)
    return f"<b>{title}</b>{rows}"
