"""The page of a report: one HTML file that needs nothing besides itself."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from itertools import islice

from hpstage.driver.differences import explain
from hpstage.plan.facts import ForkVerified, StageFailed, StateDiffers, TrialId
from hpstage.plan.savings import Savings
from hpstage.report.book import Book
from hpstage.report.pictures import Picture
from hpstage.report.pauses import Pauses
from hpstage.report.studies import Best, StudyRow, study_rows
from hpstage.report.sums import failures_of
from hpstage.schedule import Constant, Schedule
from hpstage.text import count_of, duration, shortened

# A fault in the user's code often fails hundreds of trials alike.
_FAILURES = 20
_TRACEBACK = 20_000  # characters, the last ones
_STUDIES = 200
_BEST_OF = 20  # studies whose best trial is shown
_FRONT = 100
_TOP = 10
_NAMES = 12  # trials that are named
_PIECES = 12  # of a schedule
_TABLES = (
    "The rows behind this page lie beside it: <code>trials.csv</code>, <code>stages.csv</code>, "
    "<code>states.csv</code>, <code>workers.csv</code> and <code>savings.json</code>."
)
_NO_TABLES = (
    "The figures lie beside this page in <code>savings.json</code>. The rows behind them are written by "
    "<code>hpstage report --tables</code> and <code>hpstage export</code>."
)
_TEXT = 300  # characters of a value or a summary


def page(book: Book, saved: Savings, pictures: Iterable[tuple[Picture, bytes]], *, tables: bool) -> str:
    """The whole page. All text that comes from the user is escaped; nothing is loaded from elsewhere.

    Args:
        pictures: asked for when all else is there.
        tables: they lie beside the page, as CSV files.
    """
    rows = study_rows(book, lambda study: False)
    several = f"{len(rows):,} studies on one plan" if rows else "A plan without studies"
    name = escape(rows[0].study if len(rows) == 1 else several)
    style = files("hpstage.report").joinpath("page.css").read_text(encoding="utf-8")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="generator" content="hpstage">',
            f"<title>{name} - hpstage</title>",
            f"<style>{style}</style></head>",
            "<body>",
            f"<h1>{name}</h1>",
            *_heading(book, saved, rows),
            *(_studies(rows) if len(rows) > 1 else ()),
            "<h2>Savings</h2>",
            *_savings(saved, book.pauses),
            *_winners(book),
            *_differences(book.account.plan.differences),
            *_failures(failures_of(book), book),
            *(line for picture, png in pictures for line in _figure(picture, png)),
            f'<p class="note">{_TABLES if tables else _NO_TABLES}</p>',
            "</body></html>",
            "",
        ]
    )


# --- what was searched ------------------------------------------------------------------------------------


def _heading(book: Book, saved: Savings, rows: list[StudyRow]) -> Iterable[str]:
    started = book.started
    if started is not None and len(rows) == 1:
        when = datetime.fromtimestamp(started.at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        directions = [f" ({direction})" for direction in started.directions] or [""] * len(started.metric)
        objectives = ", ".join(
            f"{escape(metric)}{direction}" for metric, direction in zip(started.metric, directions, strict=True)
        )
        yield (
            f'<p class="note">{escape(started.algorithm)}, {escape(started.sampler)}, metric {objectives}, '
            f"begun {when}</p>"
        )
    over = all(row.state == "ended" for row in rows)
    if not saved.trials:
        yield '<p class="lead">No trial has been asked for.</p>'
    elif saved.steps_trained or not over:
        yield (
            f'<p class="lead">{count_of(saved.trials, "trial")} asked for {count_of(saved.steps_asked, "step")}; '
            f"{saved.steps_trained:,} {'was' if saved.steps_trained == 1 else 'were'} trained.</p>"
        )
    elif saved.failed:
        yield f'<p class="lead">Nothing was trained: {count_of(saved.failed, "trial")} failed.</p>'
    else:
        yield '<p class="lead">Nothing had to be trained for these trials.</p>'
    if not over:
        under_way = sum(row.trials.get("RUNNING", 0) for row in rows)
        yield (
            f'<p class="note">The search is not over: {count_of(under_way, "trial")} of it '
            f"{'is' if under_way == 1 else 'are'} open. These are the figures so far.</p>"
        )


def _studies(rows: list[StudyRow]) -> Iterable[str]:
    head = ("Study", "State", "Trials", "Best", "Steps asked", "Distinct", "Merge rate", "Used", "Alone", "Saved")
    yield "<h2>Studies</h2>"
    yield '<div class="wide"><table><thead><tr>'
    yield "".join(f'<th scope="col"{_FIGURE if i > 3 else ""}>{name}</th>' for i, name in enumerate(head))
    yield "</tr></thead><tbody>"
    for row in rows[:_STUDIES]:
        told = ", ".join(f"{number:,} {state.lower()}" for state, number in row.trials.items()) or "none"
        figures = (
            f"{row.steps_asked:,}",
            f"{row.steps_unique:,}",
            f"{row.merge_rate:.2f}",
            duration(row.seconds_used),
            duration(row.seconds_alone),
            duration(row.seconds_saved),
        )
        yield (
            f'<tr><th scope="row">{escape(row.study)}</th><td>{"ended" if row.state == "ended" else "open"}</td>'
            f"<td>{told}</td><td>{', '.join(map(_told, row.best)) or '-'}</td>"
            + "".join(f"<td{_FIGURE}>{figure}</td>" for figure in figures)
            + "</tr>"
        )
    yield "</tbody></table></div>"
    if len(rows) > _STUDIES:
        yield f"<p>And {len(rows) - _STUDIES:,} more.</p>"
    yield (
        '<p class="note">The first trial to ask for a stage&rsquo;s last step pays for the stage: what another study '
        "has trained before costs nothing.</p>"
    )


def _told(best: Best) -> str:
    end = f"{best.goal} " if best.goal in ("lowest", "highest") else ""
    number = best.trial.rpartition("/")[2]
    return f"{end}{escape(best.metric)} {_short(best.value)} (trial {escape(number)})"


# --- what it took -----------------------------------------------------------------------------------------


def _savings(saved: Savings, pauses: Pauses) -> Iterable[str]:
    bound = saved.lower_bound_seconds
    gaps = len(pauses.gaps)
    without = f", without {count_of(gaps, 'pause')} between calls ({duration(pauses.seconds)})" if gaps else ""
    over = f", {saved.makespan / bound:.2f} times the lower bound ({duration(bound)})" if bound else ""
    parts = [
        ("training", saved.train_seconds),
        ("evaluating", saved.evaluate_seconds),
        ("loading checkpoints", saved.load_seconds),
        ("saving checkpoints", saved.save_seconds),
        ("thrown away", saved.wasted_seconds),
    ]
    yield '<div class="wide"><table><tbody>'
    yield _row("Trials", f"{saved.trials:,}", f"{saved.failed:,} failed" if saved.failed else "")
    yield _row("Steps asked for", f"{saved.steps_asked:,}")
    yield _row("Distinct steps among them", f"{saved.steps_unique:,}")
    yield _row("Steps trained", f"{saved.steps_trained:,}")
    yield _row("Merge rate", f"{saved.merge_rate:.2f}", f"by measured seconds {saved.cost_weighted_merge_rate:.2f}")
    yield _row("Every trial alone", duration(saved.worker_seconds_alone), f"{saved.gpu_hours_alone:.4g} worker-hours")
    yield _row("Worker time used", duration(saved.worker_seconds), f"{saved.gpu_hours_used:.4g} worker-hours")
    for name, seconds in parts:
        share = f"{seconds / saved.worker_seconds:.1%}" if saved.worker_seconds else ""
        yield _row(name, duration(seconds), share, part=True)
    yield _row("Saved", duration(saved.saved_seconds), f"{saved.gpu_hours_saved:.4g} worker-hours")
    yield _row("Makespan", duration(saved.makespan), f"on {count_of(saved.workers, 'worker')}{over}")
    yield _row("Checkpoints of the plan", f"{saved.kept:,}", f"{saved.kept_bytes:,} bytes")
    yield "</tbody></table></div>"
    yield (
        '<p class="note">Alone is an estimate from the same run: every trial&rsquo;s own steps at the mean measured '
        "seconds per step of the nodes that it passes, and one mean evaluation for each of its results. It leaves out "
        "loading and saving. A trial that failed, or is not over, counts up to its last result. Used and saved add "
        "up to it exactly. The makespan is from the first stage&rsquo;s beginning to the last report, on the "
        f"workers&rsquo; clock{without}.</p>"
    )


_FIGURE = ' class="figure"'


def _row(name: str, figure: str, note: str = "", *, part: bool = False) -> str:
    kind = ' class="part"' if part else ""
    return (
        f'<tr{kind}><th scope="row">{escape(name)}</th><td{_FIGURE}>{escape(figure)}</td><td>{escape(note)}</td></tr>'
    )


# --- what came of it --------------------------------------------------------------------------------------


def _winners(book: Book) -> Iterable[str]:
    if len(book.studies) > 1:
        yield "<h2>Best trials</h2>"
        for study in book.studies[:_BEST_OF]:
            yield f"<h3>{escape(study)}</h3>"
            yield from _winner(Book(book.account, study))
        if len(book.studies) > _BEST_OF:
            yield f"<p>And {len(book.studies) - _BEST_OF:,} more studies: give one to see its own report.</p>"
    elif book.started is not None and len(book.started.metric) > 1:
        yield "<h2>Pareto front</h2>"
        yield from _winner(book)
    else:
        yield "<h2>Best trial</h2>"
        yield from _winner(book)
        yield from _runners_up(book)


def _winner(book: Book) -> Iterable[str]:
    started = book.started
    if not book.values:
        yield "<p>No trial has been completed.</p>"
    elif started is None or len(started.directions) != len(started.metric):
        yield "<p>The journal does not tell what is better: it is of an earlier build.</p>"
    elif book.best is None:
        yield from _front(book)
    else:
        best = book.best
        value = f"{escape(book.metric or '')} {_short(book.values[best][0])}"
        yield f'<p class="lead">Trial {_number(book, best)}: {value}</p>'
        yield from _values(book, best)


def _values(book: Book, id: TrialId) -> Iterable[str]:
    """The parameters and the schedules of a trial."""
    trial, proposed = book.trials[id], book.account.plan.searches.proposed.get(id)
    yield '<div class="wide"><table><tbody>'
    for name, value in {} if proposed is None else sorted(proposed.params.items()):
        yield f'<tr><th scope="row">{escape(name)}</th><td>{_short(value)}</td></tr>'
    yield "</tbody></table></div>"
    yield f"<details><summary>Its schedules over {count_of(trial.asked, 'step')}</summary>"
    yield '<div class="wide"><table><tbody>'
    for name, schedule in sorted(trial.schedules.items()):
        yield f'<tr><th scope="row">{escape(name)}</th><td>{_schedule(schedule, trial.asked)}</td></tr>'
    yield "</tbody></table></div></details>"


def _schedule(schedule: Schedule, steps: int) -> str:
    """What a schedule is over the first ``steps`` steps: its value, or how it goes from step to step."""
    pieces = [(start, min(stop or steps, steps), form) for start, stop, form in schedule.pieces() if start < steps]
    told = []
    for start, stop, form in pieces[:_PIECES]:
        if isinstance(form, Constant):
            said = _short(form.scalar)
        else:
            said = f"{type(form).__name__.lower()}, {_short(form.value(start))} to {_short(form.value(stop - 1))}"
        told.append(said if len(pieces) == 1 else f"steps {start:,} to {stop:,}: {said}")
    if len(pieces) > _PIECES:
        told.append(f"and {len(pieces) - _PIECES:,} more")
    return "<br>".join(told)


def _front(book: Book) -> Iterable[str]:
    started = book.started
    assert started is not None
    yield f'<p class="lead">{count_of(len(book.front), "trial")} that no other is better than in every objective</p>'
    params = list(dict.fromkeys(name for id in book.front[:_FRONT] for name in _params(book, id)))
    yield from _listing(book, book.front[:_FRONT], [*started.metric], params)
    if len(book.front) > _FRONT:
        yield f"<p>And {len(book.front) - _FRONT:,} more, in the table of trials.</p>"


def _runners_up(book: Book) -> Iterable[str]:
    """The best trials below each other."""
    if book.best is None or len(book.values) < 2:
        return
    sign = -1.0 if book.maximize else 1.0
    top = sorted(book.values, key=lambda id: sign * book.values[id][0])[:_TOP]
    yield f"<details><summary>The best {len(top)} of {count_of(len(book.values), 'completed trial')}</summary>"
    params = list(dict.fromkeys(name for id in top for name in _params(book, id)))
    yield from _listing(book, top, [book.metric or ""], params)
    yield "</details>"


def _listing(book: Book, trials: list[TrialId], metrics: list[str], params: list[str]) -> Iterable[str]:
    yield '<div class="wide"><table><thead><tr><th scope="col">Trial</th>'
    yield "".join(f'<th scope="col"{_FIGURE}>{escape(metric)}</th>' for metric in metrics)
    yield "".join(f'<th scope="col">{escape(name)}</th>' for name in params)
    yield "</tr></thead><tbody>"
    for id in trials:
        own = _params(book, id)
        yield (
            f'<tr><th scope="row">{_number(book, id)}</th>'
            + "".join(f"<td{_FIGURE}>{_short(value)}</td>" for value in book.values[id])
            + "".join(f"<td>{_short(own[name]) if name in own else ''}</td>" for name in params)
            + "</tr>"
        )
    yield "</tbody></table></div>"


def _params(book: Book, id: TrialId) -> Mapping[str, object]:
    proposed = book.account.plan.searches.proposed.get(id)
    return {} if proposed is None else proposed.params


def _number(book: Book, id: TrialId) -> str:
    number = book.number(id)
    return escape(id) if number is None else str(number)


# --- what went wrong --------------------------------------------------------------------------------------


def _differences(differences: Sequence[StateDiffers | ForkVerified]) -> Iterable[str]:
    if not differences:
        return
    yield "<h2>Training that was not exact</h2>"
    yield "<p>Values of these searches may hang on how their trials were cut into stages.</p>"
    for fact in differences[:_FAILURES]:
        yield f"<p>{escape(explain(fact))}</p>"


def _failures(failures: list[tuple[StageFailed, list[TrialId]]], book: Book) -> Iterable[str]:
    if not failures:
        return
    yield "<h2>Failures</h2>"
    yield f"<p>Your code raised {count_of(len(failures), 'time')}; the trials that needed those states have failed.</p>"
    for fact, trials in failures[:_FAILURES]:
        doing = "evaluating" if fact.evaluating else "training"
        named = ", ".join(_number(book, id) for id in islice(trials, _NAMES))
        more = f" and {len(trials) - _NAMES:,} more" if len(trials) > _NAMES else ""
        who = f" (trial{'' if len(trials) == 1 else 's'} {named}{more})" if trials else ""
        yield (
            f"<details><summary>{doing}, node {fact.node}, step {fact.step:,}{who}: {_short(fact.failure.summary)}"
            f"</summary>"
        )
        trace = fact.failure.traceback
        cut = f"... {len(trace) - _TRACEBACK:,} characters before\n" if len(trace) > _TRACEBACK else ""
        yield f"<pre>{cut}{escape(trace[-_TRACEBACK:])}</pre></details>"
    if len(failures) > _FAILURES:
        yield f"<p>And {len(failures) - _FAILURES:,} more.</p>"


# --- pictures and words -----------------------------------------------------------------------------------


def _figure(picture: Picture, png: bytes) -> Iterable[str]:
    data = base64.b64encode(png).decode("ascii")
    title, caption = escape(picture.title), escape(picture.caption)
    yield f"<h2>{title}</h2>"
    yield f'<figure><div class="wide"><img alt="{title}. {caption}" src="data:image/png;base64,{data}"></div>'
    yield f"<figcaption>{caption}</figcaption></figure>"


def _short(value: object) -> str:
    """A value, escaped."""
    return escape(shortened(value, _TEXT))
