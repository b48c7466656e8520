"""The panels that are figures: workers, savings, metric, rungs. Their axes change rarely while a search runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.document import Document
from bokeh.models import ColumnDataSource, FactorRange, HoverTool, Range1d

from hpstage.cluster.dashboard.board import Shown
from hpstage.cluster.dashboard.panels import BEST, GOOD, MIDDLE, OTHER, SAVED, SPENT, Panel, around, nice
from hpstage.cluster.dashboard.study import curve
from hpstage.cluster.dashboard.work import Work, work_of
from hpstage.errors.text import shortened, size
from hpstage.report.names import plain

_CURVES = 10
_CURVE_POINTS = 200
_RUNGS = 24
_WORKERS = 48
_WORKER_TEXT = 110
_ROW = 26  # pixels of a worker


class Workers(Panel):
    """The current training of each worker, for all studies on the cluster, and the load of its GPU."""

    def make(self, doc: Document) -> None:
        self.source = ColumnDataSource({name: [] for name in ("worker", "done", "text", "gpu")})
        self.root = self.figure("Workers", y_range=FactorRange(factors=[]), x_range=Range1d(start=0, end=1))
        self.root.xaxis.visible = False
        self.root.yaxis.axis_line_color = None
        self.root.grid.visible = False
        self.root.hbar(y="worker", left=0, right=1, height=0.8, source=self.source, color=MIDDLE, alpha=0.12)
        self.root.hbar(y="worker", left=0, right="done", height=0.8, source=self.source, color=OTHER, alpha=0.45)
        for x, text, align in ((0.005, "text", "left"), (0.995, "gpu", "right")):
            self.root.text(
                x=x, y="worker", text=text, source=self.source, text_align=align, text_baseline="middle",
                text_font_size="11px", name="ink",
            )  # fmt: skip

    def version(self, shown: Shown | None, now: float) -> object:
        return now  # chains progress between two reports

    def draw(self, shown: Shown | None, now: float) -> None:
        works = work_of(self.board, self.scheduler.id, now)
        workers = self.scheduler.workers
        names = {address: plain(worker.name) for address, worker in workers.items()}
        counts = list(names.values())
        rows = sorted(names, key=lambda address: address not in works)[:_WORKERS]
        rows.sort(key=lambda address: (len(names[address]), names[address]))  # "10" after "9"
        labels = [name if counts.count(name) == 1 else address for address in rows for name in [names[address]]]
        found = [works.get(address) for address in rows]
        if list(self.root.y_range.factors) != labels[::-1]:
            self.root.y_range.factors = labels[::-1]
            if self.size["sizing_mode"] == "stretch_width":
                self.root.height = 40 + _ROW * max(1, len(rows))
        self.source.data = {
            "worker": labels,
            "done": [0.0 if work is None else round(work.done, 4) for work in found],
            "text": [_say(work) for work in found],
            "gpu": [_gpu(workers[address].metrics) for address in rows],
        }
        busy = sum(address in works for address in names)
        title = f"Workers: {busy:,} of {len(names):,} training"
        self.root.title.text = title + (f"; {_WORKERS} are shown" if len(names) > _WORKERS else "")


def _say(work: Work | None) -> str:
    if work is None:
        return "idle"
    return shortened(f"{plain(work.study)}: step {work.step:,}, to {work.stop:,}; {work.values}", _WORKER_TEXT)


def _gpu(metrics: Mapping[str, Any]) -> str:
    """Return the load of a worker's GPU as text; ``""`` if unknown. Workers report it to Dask if NVML is installed."""
    total = metrics.get("gpu-memory-total") or 0
    if total <= 0:
        return ""
    used = metrics.get("gpu_memory_used") or 0
    return f"GPU {metrics.get('gpu_utilization') or 0:.0f} %, {size(used)} of {size(total)}"


class Savings(Panel):
    """Busy worker-seconds so far, compared to the worker-seconds of the same results without sharing."""

    def make(self, doc: Document) -> None:
        self.source = ColumnDataSource({"at": [], "alone": [], "spent": [], "top": []})
        self.root = self.figure("Savings", x_axis_label="seconds since the search began", y_axis_label="worker-seconds",
                                x_range=Range1d(start=0, end=60), y_range=Range1d(start=0, end=60))  # fmt: skip
        self.root.varea("at", "spent", "top", source=self.source, color=SAVED, alpha=0.2)
        for name, colour, text in (("alone", MIDDLE, "without sharing (estimated)"), ("spent", SPENT, "spent")):
            self.root.line("at", name, source=self.source, color=colour, line_width=2, legend_label=text)
        self.style_legend(self.root, "top_left")
        self.root.yaxis.formatter.use_scientific = False

    def draw(self, shown: Shown | None, now: float) -> None:
        if shown is None:
            return
        at, alone, spent = np.array(shown.study.history.points).T
        self.source.data = {"at": at, "alone": alone, "spent": spent, "top": np.maximum(alone, spent)}
        self.root.x_range.end = max(60.0, nice(float(at[-1])))
        self.root.y_range.end = max(10.0, nice(1.05 * float(max(alone[-1], spent[-1]))))


class Metrics(Panel):
    """The metric of the best trials by step, as curves, and the results of all trials, as dots."""

    def make(self, doc: Document) -> None:
        self.source = ColumnDataSource({"steps": [], "values": [], "trial": [], "value": [], "colour": []})
        self._results = ColumnDataSource({"step": [], "value": []})
        self._drawn_results: tuple[str, int] = ("", 0)
        self.root = self.figure("Metric", x_axis_label="training step", x_range=Range1d(start=0, end=1),
                                y_range=Range1d(start=0, end=1))  # fmt: skip
        self.root.scatter("step", "value", source=self._results, size=4, color=MIDDLE, line_color=None, alpha=0.5)
        lines = self.root.multi_line(
            "steps", "values", source=self.source, line_color="colour", line_width=2, hover_line_width=4
        )
        self.root.add_tools(HoverTool(renderers=[lines], tooltips=[("trial", "@trial"), ("value", "@value{0.0000}")]))

    def draw(self, shown: Shown | None, now: float) -> None:
        if shown is None:
            return
        study, metric = shown.study, shown.study.started.metric[0]
        best = study.standings.best(_CURVES)
        curves = [
            _thinned(curve(shown.view.plan.trials[result.trial], metric, result.step), _CURVE_POINTS) for result in best
        ]
        order = range(len(best) - 1, -1, -1)  # the best last, on top
        self.source.data = {
            "steps": [[step for step, _ in curves[i]] for i in order],
            "values": [[value for _, value in curves[i]] for i in order],
            "trial": [best[i].trial for i in order],
            "value": [best[i].value for i in order],
            "colour": [BEST if i == 0 else GOOD if i < 3 else OTHER for i in order],
        }
        self._add_results(shown)
        self.root.x_range.end = 1.02 * study.longest
        if study.extent is not None:
            self.root.y_range.start, self.root.y_range.end = around(*study.extent)
        self.root.yaxis.axis_label = plain(metric)
        few = {0: "Metric", 1: "Best trial"}
        self.root.title.text = few.get(len(best), f"Best {len(best)} trials")

    def _add_results(self, shown: Shown) -> None:
        """Send new results to the browser."""
        study = shown.study
        key, before = self._drawn_results
        new = study.reported - before if key == shown.key else study.reported
        if not new:
            return
        latest = list(study.results)[-new:]
        columns = {"step": [one.step for one in latest], "value": [one.value for one in latest]}
        if key == shown.key:
            self._results.stream(columns, rollover=study.results.maxlen)
        else:
            self._results.data = columns
        self._drawn_results = shown.key, study.reported


def _thinned(points: Sequence[tuple[int, float]], most: int) -> Sequence[tuple[int, float]]:
    if len(points) <= most:
        return points
    return [*points[:: -(-len(points) // (most - 1))], points[-1]]


class Rungs(Panel):
    """The numbers of trials requested and evaluated at each step."""

    def make(self, doc: Document) -> None:
        self.source = ColumnDataSource({name: [] for name in ("step", "requested", "evaluated", "best")})
        self.root = self.figure("Trials by step", x_range=FactorRange(factors=[]), y_range=Range1d(start=0, end=1),
                                x_axis_label="training step", y_axis_label="trials")  # fmt: skip
        self.root.xgrid.visible = False
        self.root.vbar(
            "step", top="requested", width=0.7, source=self.source, color=MIDDLE, alpha=0.35, legend_label="requested"
        )
        bars = self.root.vbar(
            "step", top="evaluated", width=0.7, source=self.source, color=GOOD, legend_label="evaluated"
        )
        self.style_legend(self.root, "top_right")
        tips = [("step", "@step"), ("evaluated", "@evaluated of @requested"), ("best", "@best")]
        self.root.add_tools(HoverTool(renderers=[bars], tooltips=tips))

    def draw(self, shown: Shown | None, now: float) -> None:
        if shown is None:
            return
        rungs = shown.study.standings.rungs
        # A search without rungs may request any step: the steps that the most trials request are drawn.
        steps = sorted(sorted(rungs, key=lambda step: (-rungs[step].requested, step))[:_RUNGS])
        factors = [str(step) for step in steps]
        if list(self.root.x_range.factors) != factors:
            self.root.x_range.factors = factors
        best = [rungs[step].best for step in steps]
        self.source.data = {
            "step": factors,
            "requested": [rungs[step].requested for step in steps],
            "evaluated": [rungs[step].evaluated for step in steps],
            "best": ["none" if value is None else f"{value:.5g}" for value in best],
        }
        most = max((rung.requested for rung in rungs.values()), default=0)
        self.root.y_range.end = 1.25 * max(most, shown.study.started.n_trials or 0, 1)
        hidden = len(rungs) - len(steps)
        self.root.title.text = "Trials by step" + (f"; {hidden:,} other steps are not shown" if hidden else "")
