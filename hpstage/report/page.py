"""The page of a report: one HTML file that needs nothing besides itself."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING

from optuna.trial import FrozenTrial

from hpstage.events import StageFailed
from hpstage.report.rows import SearchFacts, best_of

if TYPE_CHECKING:
    from hpstage.result import Result, Savings

_FAILURES = 20  # shown in full; a fault in the user's code often fails hundreds of trials alike

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --faint: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0.2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.lead { font-size: 1.1rem; }
.note { opacity: 0.75; font-size: 0.9rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: 0.25rem 1.2rem 0.25rem 0; }
th, td { text-align: left; vertical-align: top; }
th { font-weight: 500; }
td { overflow-wrap: anywhere; }
table td.figure { text-align: right; white-space: nowrap; }
tr.part th { padding-left: 1.2rem; font-weight: 400; }
figure { margin: 1rem 0; }
figure img { display: block; max-width: 100%; height: auto; margin: auto; background: #fff; border-radius: 6px; }
figcaption { font-size: 0.9rem; opacity: 0.75; margin-top: 0.3rem; }
pre { background: var(--faint); padding: 0.8rem; overflow-x: auto; font-size: 0.85rem; }
@media print {
  body { max-width: none; margin: 0; font-size: 11pt; }
  h2 { break-after: avoid; }
  tr, figure { break-inside: avoid; }
  figure img { max-height: 24cm; }
}
"""

_CAPTIONS = {
    "timeline.png": (
        "Worker timeline",
        "What each worker did, and its share of busy time. Successive stages of training alternate between two blues.",
    ),
    "stage_tree.png": (
        "Stage tree",
        "Each line is trained once, for all trials that run along it: the thicker, the more. Dots are evaluations. "
        "Where there is room, the numbers at a line's end name the trials that end somewhere on it.",
    ),
}


def page(result: Result, search: SearchFacts, pictures: Mapping[str, bytes]) -> str:
    """The whole page. All text that comes from the user is escaped; nothing is loaded from elsewhere."""
    name = escape(result.study.study_name)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{name} - hpstage</title>",
            f"<style>{_STYLE}</style></head>",
            "<body>",
            f"<h1>{name}</h1>",
            *_heading(result, search),
            "<h2>Savings</h2>",
            *_savings(result.savings),
            "<h2>Best trial</h2>",
            *(_best(best_of(result)) if len(result.study.directions) == 1 else _front(result)),
            *_failures([fact for fact in search.facts if isinstance(fact, StageFailed)]),
            *(line for file, picture in pictures.items() for line in _figure(file, picture)),
            '<p class="note">The rows behind this page are in <code>trials.csv</code>, <code>stages.csv</code> and '
            "<code>savings.json</code> beside it.</p>",
            "</body></html>",
            "",
        ]
    )


def _heading(result: Result, search: SearchFacts) -> Iterable[str]:
    started = search.started
    if started is not None:
        when = datetime.fromtimestamp(started.at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        objectives = ", ".join(
            f"{escape(metric)} ({direction.name.lower()})"
            for metric, direction in zip(started.metric, result.study.directions, strict=True)
        )
        yield (
            f'<p class="note">{escape(started.algorithm)}, {escape(started.sampler)}, metric {objectives}, '
            f"begun {when}</p>"
        )
    saved = result.savings
    if saved.steps_trained:
        yield (
            f'<p class="lead">{saved.trials:,} trials asked for {saved.steps_asked:,} steps; '
            f"{saved.steps_trained:,} were trained.</p>"
        )
    elif saved.failed:
        yield f'<p class="lead">Nothing was trained: {_count(saved.failed, "trial")} failed.</p>'
    else:
        yield '<p class="lead">Nothing had to be trained in this search.</p>'


def _savings(saved: Savings) -> Iterable[str]:
    bound = saved.lower_bound_seconds
    over = f", {saved.makespan / bound:.2f} times the lower bound" if bound else ""
    parts = [
        ("training", saved.train_seconds),
        ("evaluating", saved.evaluate_seconds),
        ("loading checkpoints", saved.load_seconds),
        ("saving checkpoints", saved.save_seconds),
        (f"thrown away ({saved.steps_wasted:,} steps)", saved.wasted_seconds),
    ]
    yield "<table><tbody>"
    yield _row("Trials", f"{saved.trials:,}")
    yield _row("Steps asked for", f"{saved.steps_asked:,}")
    yield _row("Distinct steps among them", f"{saved.steps_unique:,}")
    yield _row("Steps trained", f"{saved.steps_trained:,}")
    yield _row("Merge rate", f"{saved.merge_rate:.2f}", f"by measured seconds {saved.cost_weighted_merge_rate:.2f}")
    yield _row("Worker time used", _duration(saved.worker_seconds), f"{saved.gpu_hours_used:.4g} worker-hours")
    for name, seconds in parts:
        share = f"{seconds / saved.worker_seconds:.1%}" if saved.worker_seconds else ""
        yield _row(name, _duration(seconds), share, part=True)
    yield _row(
        "Every trial alone",
        _duration(saved.worker_seconds_alone),
        f"{saved.gpu_hours_alone:.4g} worker-hours, estimated from the same run",
    )
    yield _row("Saved", _duration(saved.saved_seconds), f"{saved.gpu_hours_saved:.4g} worker-hours")
    yield _row("Makespan", _duration(saved.makespan), f"on {_count(saved.workers, 'worker')}{over}")
    yield "</tbody></table>"


def _row(name: str, figure: str, note: str = "", *, part: bool = False) -> str:
    kind = ' class="part"' if part else ""
    return (
        f'<tr{kind}><th scope="row">{escape(name)}</th><td class="figure">{escape(figure)}</td>'
        f"<td>{escape(note)}</td></tr>"
    )


def _best(best: FrozenTrial | None) -> Iterable[str]:
    if best is None:
        yield "<p>No trial has been completed.</p>"
        return
    yield f'<p class="lead">Trial {best.number}: {best.value:.6g}</p>'
    yield "<table><tbody>"
    for name, value in best.params.items():
        yield f'<tr><th scope="row">{escape(name)}</th><td>{escape(str(value))}</td></tr>'
    yield "</tbody></table>"


def _front(result: Result) -> Iterable[str]:
    trials = result.study.best_trials
    yield f'<p class="lead">{_count(len(trials), "trial")} that no other is better than in every objective</p>'
    yield "<table><tbody>"
    for trial in trials:
        values = ", ".join(f"{value:.6g}" for value in trial.values)
        yield f'<tr><th scope="row">Trial {trial.number}</th><td>{escape(values)}</td></tr>'
    yield "</tbody></table>"


def _failures(failures: list[StageFailed]) -> Iterable[str]:
    if not failures:
        return
    yield "<h2>Failures</h2>"
    yield f"<p>Your code raised {_count(len(failures), 'time')}; the trials that needed those states have failed.</p>"
    for fact in failures[:_FAILURES]:
        doing = "evaluating" if fact.evaluating else "training"
        yield f"<details><summary>{doing}, node {fact.node}, step {fact.step}: {escape(fact.failure.summary)}</summary>"
        yield f"<pre>{escape(fact.failure.traceback)}</pre></details>"
    if len(failures) > _FAILURES:
        yield f"<p>And {len(failures) - _FAILURES:,} more.</p>"


def _figure(file: str, picture: bytes) -> Iterable[str]:
    title, caption = _CAPTIONS[file]
    data = base64.b64encode(picture).decode("ascii")
    yield f"<h2>{title}</h2>"
    yield f'<figure><img alt="{title}. {caption}" src="data:image/png;base64,{data}">'
    yield f"<figcaption>{caption}</figcaption></figure>"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _duration(seconds: float) -> str:
    if abs(seconds) < 1:
        return f"{1000 * seconds:.0f} ms"
    if abs(seconds) < 60:
        return f"{seconds:.2f} s"
    if abs(seconds) < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:,.2f} h"
