"""Tables for terminals."""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from hpstage.errors.text import aligned, allocated_time, folded, nearest, table


def test_the_busy_share_of_workers_is_at_most_100_percent() -> None:
    assert allocated_time(9000, 8640) == "2.50 h, 96 % busy"
    assert allocated_time(90, 104.4) == "90.0 s, and others in addition"  # of another search
    assert allocated_time(0, 10) == "0 s"


def test_nearest_finds_a_name_of_similar_spelling_or_by_its_initials() -> None:
    names = ["lr", "momentum", "weight_decay"]
    assert nearest("wd", names) == nearest("wieght_decay", names) == "weight_decay"
    assert nearest("momentun", names) == "momentum"
    assert nearest("rl", names) is nearest("m", names) is nearest("seed", names) is None


def test_table_columns_fit_their_widest_cell_and_names_are_not_read_as_markup() -> None:
    rows = [("study", "state", "trials"), ("[bold]x[/] :smile:", "alive", "10,000"), ("", "gone", "")]
    assert table(rows, left=2).split("\n") == [
        "study               state  trials",
        "[bold]x[/] :smile:  alive  10,000",
        "                    gone",
    ]


def test_a_table_counts_a_wide_character_as_two_columns() -> None:
    assert table([("日本", "1"), ("abc", "2")]).split("\n") == ["日本  1", "abc   2"]


def test_a_table_without_a_width_is_not_wrapped() -> None:
    assert table([("a b " * 1000, "1")]).count("\n") == 0


def test_aligned_text_puts_values_below_each_other() -> None:
    assert aligned([("a", "1"), ("long", "2 3")]) == "a     1\nlong  2 3"


def test_a_narrow_table_folds_its_header_first_and_then_its_last_column() -> None:
    rows = [("study", "state", "steps given"), ("digits", "ended", "18"), ("wide resnet", "running", "7,000")]
    assert table(rows, left=2, width=31).split("\n") == [
        "study        state    steps",
        "                      given",
        "digits       ended       18",
        "wide resnet  running  7,000",
    ]
    assert table(rows, left=2, width=20).split("\n") == [
        "study        state",
        "digits       ended",
        "  steps given 18",
        "wide resnet  running",
        "  steps given 7,000",
    ]


CELLS = st.text("abc 日", max_size=30)


@given(
    rows=st.integers(1, 4).flatmap(lambda n: st.lists(st.tuples(*[CELLS] * n), min_size=1, max_size=4)),
    left=st.integers(0, 2),
    width=st.integers(1, 70),
)
@example(rows=[("a", "b")], left=1, width=1)
@example(rows=[("a", "b" * 200), ("c" * 200, "")], left=1, width=60)
def test_a_table_of_limited_width_cuts_no_word_and_has_no_line_wider_than_needed(
    rows: list[tuple[str, ...]], left: int, width: int
) -> None:
    words = sorted(word for row in rows for cell in row for word in cell.split())
    shown = table(rows, left=left, width=width)
    assert set(re.split(r"[\s;]+", shown)) - {""} <= set(words)
    first = max(cell_len(row[0]) for row in rows)  # a name is not folded: it is what the rest of a row hangs on
    longest = max(map(cell_len, words), default=0)
    assert all(cell_len(line) <= max(width, first, longest + 3) for line in shown.split("\n"))
    assert all(word in shown for row in rows[1:] for cell in row for word in cell.split())


@given(text=st.text("ab \n", max_size=60), width=st.integers(1, 20))
def test_folding_text_keeps_its_words(text: str, width: int) -> None:
    assert folded(text, width).split() == text.split()


def test_aligned_text_wraps_wide_values_within_their_column() -> None:
    assert aligned([("a", "1 2 3"), ("long", "4 5")], width=10) == "a     1 2\n      3\nlong  4 5"
