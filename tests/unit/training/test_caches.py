"""What is remembered of the user's code does not keep it alive: a process may run any number of searches."""

from __future__ import annotations

import gc
import weakref

import pytest

from hpstage.training.code.attributes import slots_of
from hpstage.training.code.graph import Graph
from hpstage.training.code.owner import is_users_code


@pytest.mark.ci
def test_a_class_is_freed_after_is_users_code_was_called_on_it() -> None:
    cls = type("Made", (), {})
    assert is_users_code(cls)
    seen = weakref.ref(cls)
    del cls
    gc.collect()
    assert seen() is None


@pytest.mark.ci
def test_a_class_is_freed_after_slots_of_was_called_on_many_other_classes() -> None:
    cls = type("Made", (), {"__slots__": ("a",)})
    assert list(slots_of(cls)) == ["a"]
    seen = weakref.ref(cls)
    del cls
    for number in range(5000):
        slots_of(type(f"Other{number}", (), {}))
    gc.collect()
    assert seen() is None


@pytest.mark.ci
def test_values_of_a_module_are_freed_with_the_graph_that_found_them() -> None:
    data = {1}
    names: dict[str, object] = {"__name__": "__main__", "value": data}
    exec("def train():\n    return value", names)
    graph = Graph(names["train"])
    [slot] = graph.namespaces.values()
    assert slot.path == "__main__:value"
    assert Graph(names["train"]).namespaces == graph.namespaces, "one slot for each name"
    seen = weakref.ref(data)
    del data, names, graph, slot
    gc.collect()
    assert seen() is None
