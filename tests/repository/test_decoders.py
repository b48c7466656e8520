"""All of msgspec's decoders are made on import: two threads that make the first one of a class at once can crash."""

from __future__ import annotations

import ast

import pytest

from tests.repository.test_rooms import FILES


def made_late(source: str) -> list[str]:
    """Calls of msgspec in a file that gather what it must know of a class, and are not made on import."""
    if not any(word in source for word in ("Decoder", "decode", "convert")):
        return []  # most files, and parsing takes all of the time
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    late = {call for function in functions for call in ast.walk(function) if isinstance(call, ast.Call)}
    found = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        typed = name.endswith(".decode") and any(keyword.arg == "type" for keyword in call.keywords)
        if (name.endswith(".Decoder") and call in late) or typed or name in ("msgspec.convert", "convert"):
            found.append(ast.unparse(call))
    return found


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_module_makes_its_msgspec_decoders_on_import(name: str) -> None:
    assert made_late(FILES[name].read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(text): return msgspec.json.decode(text, type=Kind)",
        "def f(text): return msgspec.convert(text, Kind)",
        "class C:\n    def f(self): return msgspec.msgpack.Decoder(Kind)",
    ],
)
def test_msgspec_decoders_made_at_run_time_are_found(source: str) -> None:
    assert len(made_late(source)) == 1
