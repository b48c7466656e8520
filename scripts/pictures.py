"""Makes the pictures of README.md and the book, all of them.

    .venv/bin/python scripts/pictures.py [NAME ...]

They go to notebooks/pictures. stage_tree and savings are drawn from the recorded plan (scripts/record.py); dashboard is
taken of the demo while it runs, by a headless chromium (needs playwright, which the tests bring, and Debian's
chromium).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import optuna
from distributed import Client

import hpstage
from hpstage import report
from hpstage.algos import SuccessiveHalving
from hpstage.cluster import local_cluster

sys.path.insert(0, str(Path(__file__).parent))
from demo_digits import N_TRIALS, STEPS, Digits, space

FOLDER = Path(__file__).parent.parent / "notebooks"
PICTURES = FOLDER / "pictures"
RECORDED = FOLDER / "recorded" / "digits"

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_WIDTH, _HEIGHT = 1400, 830
_TRIALS = 45  # of the demo that are over when its page is looked at
_SETTLED = 1500  # milliseconds in which the page has drawn all


def stage_tree() -> None:
    report.save(report.draw_stage_tree(report.open_book(RECORDED, "digits")), PICTURES / "stage_tree.png")


def savings() -> None:
    report.save(report.draw_savings(report.open_book(RECORDED)), PICTURES / "savings.png")


def dashboard() -> None:
    """The page on Dask's dashboard, of a demo that is half done."""
    from playwright.sync_api import sync_playwright

    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"the picture of the dashboard needs one of {', '.join(_BROWSERS)}")
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
        with sync_playwright() as play:
            options = ["--no-sandbox", "--disable-gpu"]
            opened = play.chromium.launch(executable_path=browser, headless=True, args=options)
            page = opened.new_page(viewport={"width": _WIDTH, "height": _HEIGHT})
            page.goto(f"{cluster.dashboard_link.rpartition('/')[0]}/hpstage")
            half_done.wait()
            page.wait_for_timeout(_SETTLED)
            page.screenshot(path=PICTURES / "dashboard.png")
            opened.close()
        searching.join()


MADE: dict[str, Callable[[], None]] = {one.__name__: one for one in (stage_tree, savings, dashboard)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *MADE], metavar="NAME", help=f"of {', '.join(MADE)}")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in parser.parse_args().names or MADE:
        MADE[name]()
        print(PICTURES / f"{name}.png")


if __name__ == "__main__":
    main()
