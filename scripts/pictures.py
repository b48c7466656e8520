"""Makes the pictures of README.md and the book, all of them.

    .venv/bin/python scripts/pictures.py [NAME ...]

They go to notebooks/pictures; those that are only to be looked at go to build/screens. beside_alone, stage_tree and
savings are drawn from recorded plans (scripts/record.py), optuna_curves by Optuna from a search of the demo's,
growing_tree from a search of its own (scripts/growing_tree.py).
The others are screenshots (scripts/screenshots.py): dashboard of the demo while it runs; report_page of reports, and
live_page of Dask's page, of 48 to 10,000 simulated trials, in light, in dark and on a phone.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import optuna
from distributed import Client

import hpstage
from hpstage import report
from hpstage.algos import SuccessiveHalving
from hpstage.cluster import local_cluster
from hpstage.cluster.dashboard.follower import Follower
from hpstage.store import MemoryJournal

sys.path.insert(0, str(Path(__file__).parent))
from demo_digits import N_TRIALS, STEPS, Digits, space
from growing_tree import moving, trained
from screenshots import LOOKS, SIZES, Look, browser, keep, looked_at, simulated

FOLDER = Path(__file__).parent.parent / "notebooks"
PICTURES = FOLDER / "pictures"
SCREENS = FOLDER.parent / "build" / "screens"
RECORDED = FOLDER / "recorded" / "digits"

_TRIALS = 45  # of the demo that are over when its page is looked at
_SETTLED = 1500  # milliseconds in which the page has drawn all


def stage_tree() -> Iterator[Path]:
    figure = report.draw_stage_tree(report.open_book(RECORDED, "digits"))
    yield report.save(figure, PICTURES / "stage_tree.png")


def beside_alone() -> Iterator[Path]:
    figure = report.draw_beside_alone(report.open_book(RECORDED.parent / "demo"))
    yield report.save(figure, PICTURES / "beside_alone.png")


def savings() -> Iterator[Path]:
    yield report.save(report.draw_savings(report.open_book(RECORDED)), PICTURES / "savings.png")


def growing_tree() -> Iterator[Path]:
    """A moving picture, of a search of its own."""
    with tempfile.TemporaryDirectory() as store, warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        phases = trained(Path(store))
        path = PICTURES / "growing_tree.svg"
        path.write_text(moving(report.open_book(store), phases))
    yield path


def report_page() -> Iterator[Path]:
    """The first screen of reports."""
    with browser() as opened, tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            address = report.write_report(folder, simulated(size), tables=False).as_uri()
            for look in LOOKS:
                with looked_at(opened, address, look) as page:
                    page.frame_locator("iframe").locator(".bk-Figure canvas").first.wait_for()
                    page.wait_for_timeout(_SETTLED)
                    yield keep(page, SCREENS / f"report_{size}_{look.name}.png")


def dashboard() -> Iterator[Path]:
    """The page on Dask's dashboard, of a demo that is half done."""
    half_done = threading.Event()

    def look(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if sum(other.state.is_finished() for other in study.get_trials(deepcopy=False)) >= _TRIALS:
            half_done.set()

    with tempfile.TemporaryDirectory() as store, local_cluster(2) as cluster, Client(cluster) as client:
        study = optuna.create_study(
            study_name="digits", direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0)
        )

        def search() -> None:
            hpstage.optimize(
                study,
                Digits(),
                space,
                metric="accuracy",
                steps=STEPS,
                n_trials=N_TRIALS,
                algorithm=SuccessiveHalving(min_steps=15, reduction_factor=4, tree_aware=False),
                executor=client,
                store=store,
                callbacks=[look],
            )

        searching = threading.Thread(target=search)
        searching.start()
        address = f"{cluster.dashboard_link.rpartition('/')[0]}/hpstage"
        with browser() as opened, looked_at(opened, address, Look("wide", "light", 1400, 830)) as page:
            half_done.wait()
            page.wait_for_timeout(_SETTLED)
            path = keep(page, PICTURES / "dashboard.png")
        searching.join()
    yield path


def live_page() -> Iterator[Path]:
    """The page on Dask's dashboard of simulated studies that are three quarters done, of any size, in any light."""
    for size in SIZES:
        journal = simulated(size, part=0.75)
        with (
            local_cluster(2, gpus=0) as cluster,
            Client(cluster) as client,
            closing(Follower(journal, lambda: client)),
            browser() as opened,
        ):
            address = f"{cluster.dashboard_link.rpartition('/')[0]}/hpstage"
            for look in LOOKS:
                with looked_at(opened, address, look) as page:
                    page.wait_for_function(_HAS_TRIALS, arg=0.7 * size)
                    page.wait_for_timeout(_SETTLED)
                    yield keep(page, SCREENS / f"page_{size}_{look.name}.png")


def optuna_curves() -> Iterator[Path]:
    """Optuna's own picture of a study that hpstage has driven."""
    study = optuna.create_study(
        study_name="digits", direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0)
    )
    hpstage.optimize(
        study,
        Digits(),
        space,
        metric="accuracy",
        steps=STEPS,
        n_trials=24,
        algorithm=SuccessiveHalving(min_steps=15, reduction_factor=2),
        executor=hpstage.InlineExecutor(),
        store=MemoryJournal(),
        show_progress_bar=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        axes = optuna.visualization.matplotlib.plot_intermediate_values(study)
    axes.get_legend().remove()
    axes.figure.set_size_inches(8, 4)
    yield report.save(axes.figure, PICTURES / "optuna_curves.png")


_HAS_TRIALS = """trials => Bokeh.documents.some(document =>
    [...document._all_models.values()].some(model => model.hpstage?.size().trials >= trials))"""

MADE: dict[str, Callable[[], Iterator[Path]]] = {
    one.__name__: one
    for one in (beside_alone, growing_tree, stage_tree, savings, optuna_curves, dashboard, report_page, live_page)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *MADE], metavar="NAME", help=f"of {', '.join(MADE)}")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("hpstage").setLevel(logging.ERROR)  # some of the simulated trials fail
    PICTURES.mkdir(parents=True, exist_ok=True)
    SCREENS.mkdir(parents=True, exist_ok=True)
    for name in parser.parse_args().names or MADE:
        for path in MADE[name]():
            print(f"{path} ({path.stat().st_size:,} bytes)", flush=True)


if __name__ == "__main__":
    main()
