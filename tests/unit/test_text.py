"""Tables for terminals."""

from __future__ import annotations

from hpstage.text import aligned, table


def test_columns_are_as_wide_as_their_widest_cell_and_names_are_no_markup() -> None:
    rows = [("study", "state", "trials"), ("[bold]x[/] :smile:", "alive", "10,000"), ("", "gone", "")]
    assert table(rows, left=2).split("\n") == [
        "study               state  trials",
        "[bold]x[/] :smile:  alive  10,000",
        "                    gone",
    ]


def test_a_letter_that_takes_two_columns_of_a_terminal_is_counted_as_two() -> None:
    assert table([("日本", "1"), ("abc", "2")]).split("\n") == ["日本  1", "abc   2"]


def test_a_table_is_never_wrapped() -> None:
    assert table([("a b " * 1000, "1")]).count("\n") == 0


def test_values_stand_below_each_other() -> None:
    assert aligned([("a", "1"), ("long", "2 3")]) == "a     1\nlong  2 3"
