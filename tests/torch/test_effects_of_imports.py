"""What modules do to libraries when they are imported is in the key, wherever it is written, and no more of them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpstage.training.identity.code_identity import identify

ROOT = Path(__file__).parents[2]
ACTING = "import html.entities\nhtml.entities.entitydefs['mine'] = {value}\n"
TRAINING = "def train(run): return 1\n"

Key = Callable[..., str]


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Key]:
    """Writes modules, imports that of ``train`` as a new process would, and returns the key of its code."""
    import html.entities

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(html.entities, "entitydefs", {})
    names: set[str] = set()

    def forget() -> None:
        importlib.invalidate_caches()
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            del sys.modules[name]

    def key(module: str, **texts: str) -> str:
        for name, text in texts.items():
            path = tmp_path.joinpath(*name.split("__in__")[::-1]).with_suffix(".py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(text))
            names.add(name.rpartition("__in__")[2])
        forget()
        return identify(importlib.import_module(module).train).described["code"]

    yield key
    forget()
    vars(html.entities).pop("mine", None)


WRITTEN = {
    "in a module that another imports": {"nets": f"import patches\n{TRAINING}", "patches": ACTING},
    "in a module that others import, under a condition": {
        "nets": f"try:\n    from middle import missing\nexcept ImportError: pass\n{TRAINING}",
        "middle": "import patches",
        "patches": ACTING,
    },
    "in a function of another module": {
        "nets": f"import patches\npatches.act()\n{TRAINING}",
        "patches": "def act():\n    import html.entities as own\n    own.entitydefs['mine'] = {value}",
    },
    "of a value of another module": {
        "nets": f"from values import VALUE\nimport html.entities\nhtml.entities.entitydefs['mine'] = VALUE\n{TRAINING}",
        "values": "VALUE = int('{value}')",
    },
    "of a value of another module, by its attribute": {
        "nets": f"import values\nimport html.entities\nhtml.entities.entitydefs['mine'] = values.VALUE\n{TRAINING}",
        "values": "from others import *\nVALUE = made()",
        "others": "def made(): return {value}",
    },
    "in a class": {
        "nets": f"import html.entities\nclass C:\n    setattr(html.entities, 'mine', {{value}})\n{TRAINING}"
    },
    "by a text": {"nets": f'exec("import html.entities; html.entities.mine = {{value}}")\n{TRAINING}'},
    "by a comprehension": {
        "nets": f"import html.entities\n[setattr(html.entities, name, {{value}}) for name in ('mine',)]\n{TRAINING}"
    },
}


@pytest.mark.parametrize("name", WRITTEN)
def test_an_edit_of_what_an_import_does_to_a_library_changes_the_key(name: str, key: Key) -> None:
    texts = [{module: text.replace("{value}", value) for module, text in WRITTEN[name].items()} for value in "112"]
    one, again, other = [key("nets", **each) for each in texts]
    assert one == again
    assert one != other


def test_what_the_package_does_counts_for_its_modules(key: Key) -> None:
    one, other = [
        key("pkg.nets", __init____in__pkg=ACTING.format(value=value), nets__in__pkg=TRAINING) for value in "12"
    ]
    assert one != other


def test_a_value_that_is_another_in_each_process_counts_as_it_is_written(key: Key) -> None:
    text = f"import os, time\nSTARTED = time.perf_counter()\nos.environ['STARTED'] = str(STARTED)\n{TRAINING}"
    try:
        assert key("nets", nets=text) == key("nets", nets=text)
    finally:
        os.environ.pop("STARTED", None)


def test_other_statements_of_such_a_module_do_not_count(key: Key) -> None:
    acting = f"import patches\n{TRAINING}"
    edited = f"# edited\nSIZE = 3\nprint('edited')\n{ACTING.format(value=1)}def f(): return 2\n"
    assert key("nets", nets=acting, patches=ACTING.format(value=1)) == key("nets", nets=acting, patches=edited)


def test_a_module_that_training_does_not_lead_to_does_not_count(key: Key) -> None:
    acting = ACTING.format(value=1)
    assert key("nets", nets=TRAINING) == key("nets", nets=f"def f():\n    import other\n{TRAINING}", other=acting)


def test_the_statements_of_a_script_count_where_it_is_run(tmp_path: Path) -> None:
    def key(text: str) -> str:
        script = tmp_path / "script.py"
        end = (
            "\nfrom hpstage.training.identity.code_identity import identify\nprint(identify(train).described['code'])\n"
        )
        script.write_text(text + end)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.splitlines()[-1]

    plain = key(TRAINING)
    assert plain == key(f"{TRAINING}print(1)\nif __name__ == '__main__':\n    import html\n    html.mine = 1")
    assert plain != key(f"{TRAINING}{ACTING.format(value=1)}")
