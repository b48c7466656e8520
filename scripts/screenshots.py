"""Screenshots of pages in a headless browser, and simulated studies of any size to show on them.

For scripts/pictures.py. Needs playwright, which the tests bring, Debian's chromium and Pillow, which matplotlib brings.
"""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import optuna
from PIL import Image

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import NodeId, UserFailure, WorkerId
from hpstage.plan.log import split
from hpstage.plan.messages import Amendment, BoundaryReached, Chain, Report
from hpstage.schedule.forms import Form
from hpstage.store import MemoryJournal

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SIZES = (48, 300, 2_000, 10_000)
"""Numbers of trials that pages are shown with."""

_STEPS = 120
_WORKERS = 12
_FAILS = 61  # one of so many branches cannot be evaluated at its end
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_COLOURS = 255  # of a picture that is kept: text and lines look the same, in a third of the bytes
_TIMEOUT = 120_000  # milliseconds that a page may take on a busy machine


@dataclass(frozen=True, slots=True)
class Look:
    """A window in which a page is looked at: its size in CSS pixels, which are those of the picture."""

    name: str
    scheme: Literal["light", "dark"]
    width: int
    height: int


LOOKS = (
    Look("light", "light", 1280, 860),
    Look("dark", "dark", 1280, 860),
    Look("phone", "light", 390, 844),
)


# --- studies ---------------------------------------------------------------------------------------------------


def space(trial: optuna.Trial) -> dict[str, s.Schedule | float]:
    """Learning rates that drop twice, batches that grow, and a weight decay that is free from step 50 on."""
    lr = trial.suggest_categorical("lr", [0.2, 0.1, 0.05, 0.02])
    first = trial.suggest_int("first_drop", 20, 60, step=20)
    second = trial.suggest_int("second_drop", 80, 100, step=10)
    gamma = trial.suggest_categorical("gamma", [0.1, 0.2, 0.5])
    grow = trial.suggest_categorical("grow_batch_at", [40, 80])
    late = trial.suggest_float("weight_decay", 1e-5, 1e-2, log=True)
    return {
        "lr": s.multistep(lr, milestones=[first, second], gamma=gamma),
        "batch_size": s.piecewise({0: 64, grow: 256}),
        "weight_decay": s.piecewise({0: 5e-4, 50: float(f"{late:.2g}")}),
    }


class _Learning(SimulatedExecutor):
    """Workers on a virtual clock whose accuracy depends on the step and the hyperparameters, as if they trained; some
    states cannot be evaluated, and two of the workers die."""

    def __init__(self, workers: int) -> None:
        super().__init__(
            workers,
            step_seconds=lambda values: 4.0 + 256.0 / float(values["batch_size"] or 1),
            evaluate_seconds=3.0,
            load_seconds=1.0,
            save_seconds=1.0,
            state_bytes=25_000_000,
        )
        self._forms: dict[NodeId, Mapping[str, Form]] = {}
        for number, after in ((workers - 2, 700.0), (workers - 1, 1500.0)):
            self.cluster.kill(WorkerId(f"sim-{number}"), after)

    def start(self, worker: WorkerId, chain: Chain) -> None:
        self._forms |= {stage.node: stage.forms for stage in chain.stages}
        super().start(worker, chain)

    def amend(self, amendment: Amendment) -> None:
        self._forms |= {stage.node: stage.forms for stage in amendment.stages}
        super().amend(amendment)

    def wait(self, timeout: float | None) -> list[Report]:
        return [self._evaluated(report) for report in super().wait(timeout)]

    def _evaluated(self, report: Report) -> Report:
        if not isinstance(report, BoundaryReached) or report.reached.metrics is None:
            return report
        reached, measured = report.reached, report.reached.metrics
        if reached.node % _FAILS == _FAILS - 1 and reached.step > _STEPS // 2:
            failure = UserFailure(
                "ValueError: the validation set has no class 7",
                'Traceback (most recent call last):\n  File "train.py", line 41, in evaluate\n'
                "    return accuracy(model(x), y)\nValueError: the validation set has no class 7\n",
                ("builtins.ValueError", "builtins.Exception"),
            )
            return BoundaryReached(msgspec.structs.replace(reached, metrics=None), failure)
        values = {name: float(form.value(reached.step - 1) or 0) for name, form in self._forms[reached.node].items()}
        noise = float(measured["value"]) - 0.5
        lost = (
            0.6 * math.exp(-reached.step / 22)
            + 0.25 * values["lr"] * (1.0 + 0.3 * noise)
            + 0.012 * abs(math.log10(values["weight_decay"] / 3e-4))
            + 0.01 * noise
        )
        return BoundaryReached(msgspec.structs.replace(reached, metrics={"accuracy": 0.985 - lost}))


def simulated(n_trials: int, *, part: float = 1.0) -> MemoryJournal:
    """Return the journal of a study named ``digits`` of so many trials under successive halving, on virtual time.

    Args:
        part: of the journal's records, as if the study were still running.
    """
    journal = MemoryJournal()
    hpstage.optimize(
        optuna.create_study(study_name="digits", direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0)),
        object(),
        space,
        metric="accuracy",
        steps=_STEPS,
        n_trials=n_trials,
        algorithm=SuccessiveHalving(min_steps=30, reduction_factor=2, tree_aware=False),
        executor=_Learning(_WORKERS),
        store=journal,
        catch=(Exception,),
        show_progress_bar=False,
    )
    if part == 1.0:
        return journal
    begun = MemoryJournal()
    facts = [fact for record in journal.read() for fact in split(record)]
    begun.append(facts[: round(part * len(facts))])
    return begun


# --- pictures --------------------------------------------------------------------------------------------------


@contextmanager
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if program is None:
        raise SystemExit(f"pictures of pages need one of {', '.join(_BROWSERS)}")
    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=program, headless=True, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield opened
        finally:
            opened.close()


@contextmanager
def looked_at(browser: Browser, address: str, look: Look) -> Iterator[Page]:
    """Open a page; it is for the caller to wait until it has drawn all."""
    context = browser.new_context(
        viewport={"width": look.width, "height": look.height},
        color_scheme=look.scheme,
        is_mobile=look.width < 600,
        has_touch=look.width < 600,
    )
    try:
        page = context.new_page()
        page.set_default_timeout(_TIMEOUT)
        page.goto(address, timeout=_TIMEOUT)
        yield page
    finally:
        context.close()


def keep(page: Page, path: Path, *, whole: bool = False) -> Path:
    """Write what the window shows, or the ``whole`` page, as a PNG of few colours; return its path."""
    shot = Image.open(io.BytesIO(page.screenshot(full_page=whole))).convert("RGB")
    few = shot.quantize(_COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    few.save(path, format="PNG", optimize=True)
    return path
