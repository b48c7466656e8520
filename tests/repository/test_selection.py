"""A file of tests is left out of a run only where its own marks exclude all that it has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.selection import excluded_marks, leaves_out, module_marks

DEFAULT = "not slow and not ci and not gpu"


@pytest.mark.parametrize(
    ("source", "marks"),
    [
        ("pytestmark = pytest.mark.ci\n", {"ci"}),
        ("pytestmark = pytest.mark.slow  # takes [minutes\n", {"slow"}),
        ("pytestmark = [pytest.mark.redis, pytest.mark.sampled(4)]\n", {"redis", "sampled"}),
        (
            "pytestmark = [  # both\n    pytest.mark.ci,\n    pytest.mark.skipif(\n        x.y\n    ),\n]\n",
            {"ci", "skipif"},
        ),
        ("pytestmark = pytest.mark.skipif(not pytest.mark.ci, reason='')\n", {"skipif"}),
        ("pytestmark = [pytest.mark.ci] if x else []\n", set()),
        ("@pytest.mark.ci\ndef test_one(): ...\n\n\nclass TestIt:\n    pytestmark = pytest.mark.ci\n", set()),
    ],
)
def test_the_marks_of_a_test_file_are_read_from_its_pytestmark(source: str, marks: set[str]) -> None:
    assert module_marks(source + "\n\ndef test_other(): ...\n") == marks


@pytest.mark.parametrize(
    ("expression", "marks"),
    [
        (DEFAULT, {"slow", "ci", "gpu"}),
        ("not gpu", {"gpu"}),
        ("", set()),
        ("ci", set()),
        ("ci and not gpu", set()),
        ("not ci or browser", set()),
        ("not (ci or browser)", set()),
    ],
)
def test_only_marks_that_an_expression_always_excludes_leave_test_files_out(expression: str, marks: set[str]) -> None:
    assert excluded_marks(expression) == marks


@pytest.mark.parametrize(
    ("markers", "arguments", "left_out"),
    [
        (DEFAULT, ["tests"], True),
        ("not slow", ["tests"], False),
        (DEFAULT, ["tests", "tests/test_it.py"], False),
        (DEFAULT, ["tests/test_it.py::test_one[a::b]"], False),
    ],
)
def test_a_test_file_named_on_the_command_line_is_never_left_out(
    tmp_path: Path, markers: str, arguments: list[str], left_out: bool
) -> None:
    file = tmp_path / "tests" / "test_it.py"
    file.parent.mkdir()
    file.write_text("import pytest\n\npytestmark = pytest.mark.ci\n")
    config = SimpleNamespace(
        option=SimpleNamespace(markexpr=markers), args=arguments, invocation_params=SimpleNamespace(dir=tmp_path)
    )
    assert leaves_out(file, config) == left_out  # type: ignore[arg-type]
