"""``hpstage tree`` shows the stage tree of a store, as far as there is room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hpstage
from hpstage import schedule as s
from hpstage.accounting.branches import branches_of
from hpstage.cli.app import app
from hpstage.errors import UsageError
from hpstage.plan.facts import DriverId, DriverLeft
from hpstage.report import open_book
from tests.commands.stores import ask, output_of, write_in
from tests.unit.searches import trial

pytestmark = pytest.mark.sampled(8)


def test_tree_shows_each_branch_with_its_change_steps_state_and_score(searched: tuple[Path, hpstage.Result]) -> None:
    folder, result = searched
    lines = output_of("tree", folder).splitlines()
    plan = result.plan
    branches = branches_of(plan.trials)
    nodes = [branch.node for branch in branches.values()]
    assert len(lines) == len(nodes)
    by_id = {int(re.match(r"[│├└─ ]*#(\d+) ", line)[1]): line for line in lines}  # type: ignore[index]
    for node in nodes:
        line = by_id[node.id]
        indent = line.index("#")
        assert (indent == 0) == (node.parent is None) or len(node.parent.children) == 1  # type: ignore[union-attr]
        assert f"  {node.start}-{branches[node.id].reach}  " in line
        through = sum(node in [leg[0] for leg in t.path_to(t.requested)] for t in plan.trials.values())
        assert re.search(rf"  {through} trials?$", line)
        failed = any(failure.node == node.id for failure in plan.failures)
        assert ("  failed  " in line) == failed
        assert failed or "  done  " in line
        assert any(state.kept for state in node.states.values()) == ("  checkpoint at " in line)
        scores = [
            float(state.metrics["score"])
            for other in nodes
            if node in other.ancestry()
            for state in other.states.values()
            if state.metrics is not None
        ]
        assert (f"  score {min(scores):.6g}  " in line) if scores else ("  score " not in line)
    assert sum("a 1 → 7" in line or "a 2 → 7" in line for line in lines) == len({f.node for f in plan.failures}) > 0


def test_a_long_tree_omits_the_branches_with_the_fewest_trials_and_counts_them(store: Path) -> None:
    trials = [trial(i, {"a": s.piecewise({0: i % 2, 2: i % 8, 4: i})}, 8) for i in range(40)]
    write_in(store, ask(trials))
    everything = output_of("tree", store, "--lines", 1000).splitlines()
    cut = output_of("tree", store, "--lines", 5).splitlines()
    assert len(cut) == 6 and "left out" not in "".join(everything)
    left_out = int(re.match(r"\.\.\. (\d+) nodes", cut[-1])[1])  # type: ignore[index]
    assert left_out == len(everything) - 5
    assert sum(int(n) for n in re.findall(r"\(\+ (\d+) nodes? below\)", cut[0] + cut[1])) > 0
    assert all("waiting" in line for line in everything)
    roots = output_of("tree", store, "--depth", 1).splitlines()
    assert [line[0] for line in roots] == ["#", "#", "."]
    below = sum(int(n) for n in re.findall(r"\(\+ (\d+) nodes? below\)", "".join(roots)))
    assert below == int(re.match(r"\.\.\. (\d+)", roots[-1])[1]) == len(everything) - 2  # type: ignore[index]


def test_tree_marks_branches_of_an_interrupted_search_as_interrupted(store: Path) -> None:
    requests = ask([trial(0, {"a": s.piecewise({0: 1, 4: 2})}, 8)], "gone")
    write_in(store, [*requests, DriverLeft(DriverId("gone"), 1.0, "gone")])
    assert "interrupted" in output_of("tree", store)


def test_tree_does_not_indent_a_trial_with_a_hundred_changes(store: Path) -> None:
    write_in(store, ask([trial(0, {"a": s.piecewise({i: i for i in range(100)})}, 100)]))
    lines = output_of("tree", store).splitlines()
    assert len(lines) == 100 and all(line.startswith("#") for line in lines)


def test_each_branch_in_a_tree_stands_below_its_parent_or_names_its_parent(store: Path) -> None:
    """One trial leaves at step 10 and changes often from there on; the other stays on the trunk until step 40."""
    restless = {0: 0, **{i: i for i in range(10, 60, 2)}}
    trials = [
        trial(0, {"a": s.piecewise(restless)}, 70),
        trial(1, {"a": s.piecewise({0: 0, 40: 1, 50: 2})}, 70),
        trial(2, {"a": s.piecewise({0: 0, 40: 3})}, 70),
    ]
    write_in(store, ask(trials))
    parents = {
        id: branch.node.parent and branch.node.parent.id for id, branch in open_book(str(store)).branches.items()
    }
    above: list[tuple[int, int]] = []  # indents and nodes of the lines that this one may hang on
    seen, named = set(), 0
    for line in output_of("tree", store).splitlines():
        indent, id = line.index("#"), int(re.search(r"#(\d+) ", line)[1])  # type: ignore[index]
        above = [(other, node) for other, node in above if other < indent]
        if parent := re.search(r"after #(\d+)", line):
            assert int(parent[1]) == parents[id]
            named += 1
        else:
            assert (above[-1][1] if above else None) == parents[id]
        above.append((indent, id))
        seen.add(id)
    assert seen == set(parents) and named > 10


def test_tree_of_one_study_shows_only_branches_of_its_trials(searched: tuple[Path, hpstage.Result]) -> None:
    folder, result = searched
    mine = {
        node.id
        for id, t in result.plan.trials.items()
        if id.startswith("first/")
        for node, _, _ in t.path_to(t.requested)
    }
    lines = output_of("tree", folder, "--study", "first").splitlines()
    assert {int(re.search(r"#(\d+) ", line)[1]) for line in lines} == mine  # type: ignore[index]
    with pytest.raises(UsageError, match="no study 'third'; there are: 'second', 'first'"):
        CliRunner().invoke(app, ["tree", str(folder), "--study", "third"], catch_exceptions=False)
