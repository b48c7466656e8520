"""The interactive stage tree of a report in a browser: searched, clicked, folded, zoomed; hostile names are data."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.accounting.book import Book
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.report import open_book
from hpstage.report.tree.embed import tree_page
from hpstage.report.tree.layout import lay_out
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape
from tests.browser.conftest import Open, keep
from tests.browser.trees import Tree

pytest.importorskip("bokeh")
pytestmark = [pytest.mark.ci, pytest.mark.browser]
optuna.logging.set_verbosity(optuna.logging.ERROR)

HOSTILE = "</script><script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'> \"'`${} \N{GRINNING FACE}"
LONG = HOSTILE + "long " * 40
OTHERS = 30
"""Trials of a study that do not fail."""


class Broken(Tape):
    def train(self, step: int, hp: Any) -> None:
        if hp["a"] == 7:
            raise ZeroDivisionError(f"{HOSTILE} at step {step}")
        super().train(step, hp)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Book:
    """Of a study with 30 trials and 2 that fail, with hostile names in all places."""

    def space(trial: optuna.Trial) -> dict[str, object]:
        late = trial.suggest_float(LONG, 0, 1)
        return {
            "a": s.piecewise({0: 1, 4: trial.suggest_categorical("a", [2, 3, 7])}),
            "b": s.linear(1.0, total_iters=6),
            LONG: s.piecewise({0: "x", 8: f"{HOSTILE} {late}"}),
        }

    folder = tmp_path_factory.mktemp("store")
    study = optuna.create_study(study_name=HOSTILE, direction="maximize")
    for i in range(OTHERS + 2):
        study.enqueue_trial({"a": 7 if i in (3, 5) else 2 + i % 2, LONG: i / 100})
    hpstage.optimize(
        study, Broken(), space, metric="score", steps=12, n_trials=OTHERS + 2, store=folder, catch=(Exception,),
        executor=hpstage.InlineExecutor(), show_progress_bar=False, verify="off",
    )  # fmt: skip
    return open_book(folder)


@pytest.fixture
def show(open_at: Open, tmp_path: Path) -> Callable[..., Tree]:
    def show(book: Book, **options: Any) -> Tree:
        path = tmp_path / "tree.html"
        path.write_text(tree_page(book))
        page = open_at(path.as_uri(), **options)
        tree = Tree(page, len(book.trials))
        page.wait_for_function("() => document.querySelector('.bk-Column') != null")
        return tree

    return show


def many(n_trials: int, studies: tuple[str, ...] = ("study",), step: float | None = None) -> Book:
    """Trials that part at once, each with a value of its own, or with one of those that are ``step`` apart."""

    def space(trial: optuna.Trial) -> dict[str, object]:
        late = trial.suggest_float("a", 0, 1, step=step)
        return {"a": s.piecewise({0: 1, 2: late, 3: late if step else trial.suggest_int("b", 0, 9)})}

    journal = MemoryJournal()
    for name in studies:
        study = optuna.create_study(study_name=name, sampler=optuna.samplers.RandomSampler(seed=0))
        hpstage.optimize(
            study, object(), space, metric="value", steps=4, n_trials=n_trials, executor=SimulatedExecutor(8),
            store=journal, show_progress_bar=False,
        )  # fmt: skip
    return open_book(journal)


def test_trials_of_several_studies_are_named_whole_and_their_study_once(show: Callable[..., Tree]) -> None:
    tree = show(many(12, ("a study of a long name", "another of a name so long"), step=0.5))
    ends = tree.ask("fig.renderers.find((one) => one.name == 'ends').data_source.data.text")
    assert ends and not any("\N{HORIZONTAL ELLIPSIS}" in text for text in ends)
    assert all(re.search(r"trials a study of a long name/\d+, \d+, \d+ \+ \d+  0\.\d+$", text) for text in ends)
    tree = show(many(1, ("a study of a long name", "another of a name so long")))
    [end] = tree.ask("fig.renderers.find((one) => one.name == 'ends').data_source.data.text")
    assert re.search(r"trials a study of a long name/0, another of a name so long/0  0\.\d+$", end)
    keep(tree.page, "tree-of-studies")


def test_the_search_field_of_the_tree_finds_a_trial_and_opens_its_drawer(book: Book, show: Callable[..., Tree]) -> None:
    tree = show(book)
    tree.find("trial 12")
    tree.drawer.get_by_role("heading", name="Trial 12: complete").wait_for()
    text = "\n".join(tree.read())
    assert "a\n2" in text and "0.12" in text and "checkpoint" in text
    assert tree.drawer.locator("svg").count() >= 1  # b falls, and is drawn
    keep(tree.page, "report-drawer")
    tree.find("a=3")
    tree.page.get_by_text("14 trials found").wait_for()
    tree.page.keyboard.press("Escape")
    assert tree.drawer.is_hidden()


def test_the_search_field_of_the_tree_takes_several_terms_and_comparisons(
    book: Book, show: Callable[..., Tree]
) -> None:
    tree = show(book)
    best = book.best
    assert best is not None
    tree.find("best")
    tree.drawer.get_by_role("heading", name=f"Trial {best.rpartition('/')[2]}: complete").wait_for()
    tree.find("a = 3  score > -1e9  steps >= 12")
    tree.page.get_by_text("14 trials found").wait_for()
    tree.find("a>=2 a!=3")
    tree.page.get_by_text("trials found; Enter").wait_for()
    for text, said in {
        "a=2 a=3": "0 trials found",
        "scor>0.9": "Not understood: no hyperparameter or metric scor",
        "a>": "Not understood: a value is missing in a>",
    }.items():
        tree.find("trial 12")
        tree.drawer.wait_for()
        tree.find(text)
        tree.page.get_by_text(said).wait_for()
        assert tree.drawer.is_hidden()


def test_a_click_on_a_failed_branch_shows_its_traceback(book: Book, show: Callable[..., Tree]) -> None:
    tree = show(book)
    tree.find("failed")
    tree.drawer.get_by_role("heading", name="Trial 3: failed").wait_for()
    tree.page.keyboard.press("Escape")
    [leaf] = {i for i in tree.ask("tree.shown()") if tree.ask(f"tree.about({i}).failures")}
    tree.click(leaf)
    tree.drawer.locator("pre").wait_for()
    [printed] = tree.read("pre")
    assert "ZeroDivisionError" in printed and "in train" in printed
    assert any(HOSTILE in text for text in tree.read())
    keep(tree.page, "report-failed")


def test_commands_in_the_drawer_contain_the_store_and_the_trial(book: Book, show: Callable[..., Tree]) -> None:
    tree = show(book)
    tree.find("trial 12")
    commands = [text for text in tree.read("code") if text.startswith("hpstage ")]
    assert book.store and all(f" {book.store}" in command for command in commands)
    assert any(command.startswith("hpstage export ") and "/12'" in command for command in commands)
    assert any("--extend" in command and "--steps 24" in command for command in commands)


def test_the_drawer_shows_the_code_to_branch_at_the_clicked_step(book: Book, show: Callable[..., Tree]) -> None:
    tree = show(book)
    tree.find("trial 12")
    tree.drawer.wait_for()
    tree.page.keyboard.press("Escape")
    places = {i: tree.ask(f"[tree.place({i}).x, tree.about({i}).front]") for i in tree.ask("tree.shown()")}
    tree.click(next(i for i, place in places.items() if place == [8, 12]), 0.5)
    tree.drawer.get_by_role("heading", name="Branch from here: step 10").wait_for()
    command, branch, load = tree.read("code")[:3]
    _, _, store, *options = shlex.split(command)
    assert store == book.store and options[::2] == ["--trial", "--at", "--set"] and options[3] == "10"
    opened = hpstage.open(store).trial(options[1])
    assert opened.planned.node_at(10).start == 8
    assert branch.startswith(f"hpstage.open({json.dumps(store)}).trial(") and ".branch(10, " in branch
    assert ast.parse(load) and ast.unparse(ast.parse(branch)).endswith("trainable=TRAINABLE)")
    assert ast.literal_eval(branch.partition(".trial(")[2].partition(").branch(")[0]) == options[1]
    button = tree.drawer.get_by_role("button", name="Copy").first
    button.click()
    tree.drawer.get_by_role("button", name="Copied").wait_for()
    keep(tree.page, "report-branch")


def test_the_drawer_plots_the_metric_along_the_path_to_a_branch(show: Callable[..., Tree]) -> None:
    study, journal = optuna.create_study(), MemoryJournal()
    hpstage.optimize(
        study, Tape(), lambda trial: {"a": trial.suggest_float("a", 0, 1)}, metric="score", steps=8, n_trials=1,
        evaluate_every=2, executor=hpstage.InlineExecutor(), store=journal, show_progress_bar=False, verify="off",
    )  # fmt: skip
    tree = show(open_book(journal))
    tree.find("trial 0")
    tree.drawer.get_by_text("score:").wait_for()
    assert tree.drawer.locator("svg polyline").first.get_attribute("points").count(",") == 4


def test_comparing_two_trials_shows_their_branch_point_schedules_and_metrics(show: Callable[..., Tree]) -> None:
    def space(trial: optuna.Trial) -> dict[str, object]:
        return {"a": s.piecewise({0: 1, 4: trial.suggest_int("late", 0, 9)}), "b": 2}

    study, journal = optuna.create_study(), MemoryJournal()
    for late in (5, 7):
        study.enqueue_trial({"late": late})
    result = hpstage.optimize(
        study, Tape(), space, metric="score", steps=8, n_trials=2, evaluate_every=2,
        executor=hpstage.InlineExecutor(), store=journal, show_progress_bar=False, verify="off",
    )  # fmt: skip
    tree = show(open_book(journal), height=1400)
    tree.find("trial 0")
    tree.drawer.get_by_role("button", name="Compare").click()
    tree.drawer.get_by_role("button", name="Stop comparing").wait_for()
    tree.find("trial 1")
    tree.drawer.get_by_role("button", name="Compare with trial 0").click()
    tree.drawer.get_by_role("heading", name="Trials 0 and 1 diverge at step 4").wait_for()
    text = "\n".join(tree.read())
    assert "1 to 5; 1 to 7" in text
    first, second = (result.trial(number).metrics[8]["score"] for number in (0, 1))
    assert f"{first:.4g}"[:5] in text and f"{second:.4g}"[:5] in text
    keep(tree.page, "report-compared")


def test_hostile_names_are_shown_as_text_in_the_tree_and_its_drawer(book: Book, show: Callable[..., Tree]) -> None:
    tree = show(book)
    tree.find("failed")
    tree.drawer.wait_for()
    for branch in tree.ask("tree.shown()")[:6]:
        tree.page.mouse.move(*tree.point(branch))
        tree.page.wait_for_timeout(50)  # hints come with the next frame
    assert any(HOSTILE[:40] in text for text in tree.read())
    assert tree.page.evaluate("() => window.harmed") is None
    assert tree.page.locator("img[src=x]").count() == 0


def test_a_click_on_a_square_folds_and_unfolds_the_branches_below_it(book: Book, show: Callable[..., Tree]) -> None:
    tree = show(book)
    rows = tree.ask("tree.size().rows")
    [root] = [i for i in tree.ask("tree.shown()") if tree.ask(f"tree.about({i}).parent") == -1]
    tree.click(root, share=0.0)
    tree.wait("tree.size().rows == 1")
    tree.click(root, share=0.0)
    tree.wait(f"tree.size().rows == {rows}")


def test_mouse_wheel_and_keys_scroll_and_zoom_the_tree(show: Callable[..., Tree]) -> None:
    tree = show(many(300))
    root = tree.ask("tree.order()[0]")
    for _ in range(3):
        tree.ask(f"tree.unfold({root})")
    tree.wait("tree.size().rows > 100")
    top = tree.ask("fig.y_range.end")
    tree.page.mouse.move(600, 400)
    tree.page.mouse.wheel(0, 600)
    tree.wait(f"fig.y_range.end > {top} + 10")
    wide = tree.ask("fig.x_range.end - fig.x_range.start")
    tree.page.keyboard.down("Control")
    tree.page.mouse.wheel(0, -300)
    tree.page.keyboard.up("Control")
    tree.wait(f"fig.x_range.end - fig.x_range.start < 0.9 * {wide}")
    tree.page.locator(".bk-Figure").focus()
    tree.page.keyboard.press("Home")
    tree.wait("fig.y_range.end == -1")
    tree.page.keyboard.press("ArrowDown")
    tree.drawer.get_by_role("heading", name="Node").wait_for()
    # The drawer does not cover the tree.
    assert tree.page.locator(".bk-Figure").bounding_box()["width"] < 1400 - 380


@pytest.mark.parametrize("n_trials", [1, pytest.param(40, marks=pytest.mark.slow), 300])
def test_branches_have_the_same_rows_in_the_browser_as_in_the_printed_tree(
    n_trials: int, show: Callable[..., Tree]
) -> None:
    layout = lay_out(many(n_trials))
    tree = show(layout.book)
    rows = {int(node): row for node, row in tree.ask("tree.rows()").items()}
    shown = [layout.place[node] for node in rows]  # type: ignore[index]
    placed = layout.placed(shown)
    assert {layout.branches[i].branch.node.id: row for i, row in placed.rows.items()} == rows
    assert tree.ask("tree.size().rows") == placed.count
    assert layout.best <= set(shown)


def test_the_colour_bar_shows_the_metric_values_of_its_colours(book: Book, show: Callable[..., Tree]) -> None:
    found = many(9)
    tree = show(found)
    values = sorted({measured.value for measured in found.measured.values() if measured.value is not None})
    title, shown = tree.ask("tree.legend()")
    assert title == "value, best at or below, by rank"
    assert shown == [values[-1], values[(len(values) - 1) // 2], values[0]]  # minimized: the worst first
    assert [tree.ask(f"tree.valued({rank})") for rank in (0, 1)] == [f"{values[at]:.5g}" for at in (-1, 0)]


def test_the_tree_works_by_touch_on_a_phone_in_dark_mode(book: Book, show: Callable[..., Tree]) -> None:
    tree = show(book, width=390, height=844, has_touch=True, color_scheme="dark")
    assert tree.page.evaluate("() => document.documentElement.scrollWidth") <= 390
    [root] = [i for i in tree.ask("tree.shown()") if tree.ask(f"tree.about({i}).parent") == -1]
    tree.tap(root)
    tree.drawer.get_by_role("heading", name="Node").wait_for()
    assert tree.drawer.bounding_box()["y"] > 300  # below the tree, not over it
    box = tree.page.locator("input").evaluate("input => getComputedStyle(input).backgroundColor")
    assert box == "rgb(29, 31, 33)"
    keep(tree.page, "report-phone-dark")
