"""What modules do to libraries when they are imported is in the key, wherever it is written, and no more of them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpstage.training.identity.code_identity import identify

pytestmark = pytest.mark.sampled(2)

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
    "in a method": {
        "nets": "import html.entities\nclass C:\n    def act(self): html.entities.mine = {value}\n"
        f"C().act()\n{TRAINING}"
    },
    "in a function of a class, that is wrapped": {
        "nets": "import functools, html.entities\nclass C:\n    @staticmethod\n    @functools.lru_cache\n"
        f"    def act(): html.entities.mine = {{value}}\nDONE = C.act()\n{TRAINING}"
    },
    "of a value that is deleted": {
        "nets": f"import html.entities\nx = {{value}}\nhtml.entities.mine = x\ndel x\n{TRAINING}"
    },
    "by mock": {
        "nets": "import html.entities\nfrom unittest import mock\n"
        f"mock.patch.dict(html.entities.entitydefs, mine={{value}}).start()\n{TRAINING}"
    },
    "by a variable whose name ends as a place's begins": {
        "nets": f"import os\nos.environ['DROP_PATH_RATE'] = '{{value}}'\nos.environ['IMPORTANCE'] = '1'\n{TRAINING}"
    },
    "by a comprehension": {
        "nets": f"import html.entities\n[setattr(html.entities, name, {{value}}) for name in ('mine',)]\n{TRAINING}"
    },
}


@pytest.mark.parametrize("name", WRITTEN)
def test_an_edit_of_how_an_import_changes_a_library_changes_the_key(name: str, key: Key) -> None:
    texts = [{module: text.replace("{value}", value) for module, text in WRITTEN[name].items()} for value in "112"]
    one, again, other = [key("nets", **each) for each in texts]
    assert one == again
    assert one != other


def test_import_effects_of_a_package_are_in_the_keys_of_its_modules(key: Key) -> None:
    one, other = [
        key("pkg.nets", __init____in__pkg=ACTING.format(value=value), nets__in__pkg=TRAINING) for value in "12"
    ]
    assert one != other


def test_an_import_effect_whose_value_differs_in_each_process_keeps_the_key(key: Key) -> None:
    text = f"import os, time\nSTARTED = time.perf_counter()\nos.environ['STARTED'] = str(STARTED)\n{TRAINING}"
    try:
        assert key("nets", nets=text) == key("nets", nets=text)
    finally:
        os.environ.pop("STARTED", None)


def test_other_statements_of_a_module_with_import_effects_are_not_in_the_key(key: Key) -> None:
    acting = f"import patches\n{TRAINING}"
    edited = f"# edited\nSIZE = 3\nprint('edited')\n{ACTING.format(value=1)}def f(): return 2\n"
    assert key("nets", nets=acting, patches=ACTING.format(value=1)) == key("nets", nets=acting, patches=edited)


SAME = {
    "names of its own in a function": "def main(x):\n    d = x = {value}\n",
    "an argument": "def plot(results, d={value}): pass\n",
    "an attribute of a class": "class Shown:\n    d = {value}\n",
    "what is run as a script": "if __name__ == '__main__':\n    d = {value}\n",
    "imports that no process makes": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import acting{value}\n",
    "files": "import shutil, pathlib\nshutil.rmtree('missing{value}', ignore_errors=True)\n",
    "a place": "import os\nos.environ['HF_HOME'] = '{value}'\n",
}


@pytest.mark.parametrize("name", SAME)
def test_an_edit_of_code_unrelated_to_import_effects_keeps_the_key(
    name: str, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", "")
    acting = {f"acting{value}": ACTING.format(value=value) for value in "12"}
    key("acting1", **{module: text + TRAINING for module, text in acting.items()})
    begin = "import html.entities\nd = 0\nhtml.entities.mine = d\n"
    one, other = [key("nets", nets=begin + SAME[name].replace("{value}", value) + TRAINING) for value in "12"]
    assert one == other


def test_import_effects_are_in_the_key_as_imported_and_not_as_the_file_is_now(key: Key, tmp_path: Path) -> None:
    one = key("nets", nets=f"{ACTING.format(value=1)}{TRAINING}")
    (tmp_path / "nets.py").write_text(f"{ACTING.format(value=2)}{TRAINING}")
    train = sys.modules["nets"].train
    assert identify(train).described["code"] == one
    importlib.reload(sys.modules["nets"])
    assert identify(sys.modules["nets"].train).described["code"] != one


@pytest.mark.filterwarnings("ignore")
def test_import_effects_are_in_the_key_even_if_warnings_are_errors(key: Key) -> None:
    codes = []
    for value in "12":
        key("nets", nets=f"NOT = '\\d'\n{ACTING.format(value=value)}{TRAINING}")
        importlib.reload(sys.modules["nets"])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            codes.append(identify(sys.modules["nets"].train).described["code"])
    assert codes[0] != codes[1]


def test_functions_that_call_each_other_are_searched_for_import_effects_once(key: Key) -> None:
    names = [f"helper{number}" for number in range(30)]
    body = "".join(f"    {name}()\n" for name in names)
    text = "".join(f"def {name}():\n    if calls: return\n{body}" for name in names)
    assert key("nets", nets=f"calls = 1\n{text}{names[0]}()\n{TRAINING}") == key("nets", nets=TRAINING)


def test_a_module_imported_only_by_a_function_outside_training_is_not_in_the_key(key: Key) -> None:
    acting = ACTING.format(value=1)
    assert key("nets", nets=TRAINING) == key("nets", nets=f"def f():\n    import other\n{TRAINING}", other=acting)


def test_import_effects_of_a_script_that_is_run_are_in_its_key(tmp_path: Path) -> None:
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
