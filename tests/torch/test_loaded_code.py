"""The identity is that of the code that is loaded, modules used as a whole included, and equal where equal code is."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from hpstage.errors import UsageError
from hpstage.training.identity.code_identity import Identity, differences, drifts, identify

pytestmark = pytest.mark.sampled(16)

ROOT = Path(__file__).parents[2]

NETS = """
import parts

WIDTH = 3


def build():
    return parts.layer(WIDTH)


def other():
    return 2


class Net:
    def forward(self):
        return 5
"""
PARTS = """
def layer(width):
    return [width] * 2
"""

Write = Callable[..., Any]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes modules afresh, and imports one of them as a new process would; ``importing=False`` only writes."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names: set[str] = set()

    def write(module: str, importing: bool = True, **texts: str) -> Any:
        for name, text in texts.items():
            path = tmp_path.joinpath(*name.split("__")).with_suffix(".py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(text))
            names.add(name.partition("__")[0])
        if not importing:
            return None
        forget()
        return importlib.import_module(module)

    def forget() -> None:
        importlib.invalidate_caches()
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            del sys.modules[name]

    yield write
    forget()


def code(trainable: object) -> str:
    return identify(trainable).described["code"]


WHOLE = {
    "imported in a function": """
        def train(run):
            import nets
            return getattr(nets, run.hp["arch"])()
        """,
    "imported under another name": """
        def train(run):
            import nets as other
            return [choose(other) for choose in run]
        """,
    "by getattr": """
        import nets
        def train(run):
            return getattr(nets, run.hp["arch"])()
        """,
    "by its dict": """
        import nets
        def train(run):
            return nets.__dict__[run.hp["arch"]]()
        """,
    "under another name": """
        import nets
        m = nets
        def train(run):
            return vars(m)[run.hp["arch"]]()
        """,
    "in a default": """
        import nets
        def train(run, m=nets):
            return m.build()
        """,
    "in a closure": """
        def make():
            import nets
            def train(run):
                return vars(nets)
            return train
        train = make()
        """,
    "in a container": """
        import nets
        CHOICES = {"nets": [nets]}
        def train(run):
            return CHOICES
        """,
    "as an attribute of a class": """
        import nets
        class Trainable:
            nets = nets
            def train(self): return self.nets.build()
        train = Trainable()
        """,
    "as an attribute of the object": """
        import nets
        class Trainable:
            def __init__(self): self.nets = nets
            def train(self): return self.nets.build()
        train = Trainable()
        """,
    "through another module": """
        import middle
        def train(run):
            return getattr(middle, run.hp["arch"])()
        """,
}


@pytest.mark.parametrize("script", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize(
    "change", [("return 2", "return 3"), ("WIDTH = 3", "WIDTH = 4"), ("[width] * 2", "[width] * 3"), ("5", "6")]
)
@pytest.mark.ci_one_in(3)
def test_a_module_used_as_a_whole_is_in_the_key_with_all_its_code(
    script: str, change: tuple[str, str], write: Write
) -> None:
    texts = {"script": script, "nets": NETS, "parts": PARTS, "middle": "import nets\nfrom nets import *\n"}
    before = code(write("script", **texts).train)
    remarked = {name: f'"""What it is."""\n# a comment\n\n{textwrap.dedent(text)}' for name, text in texts.items()}
    assert code(write("script", **remarked).train) == before
    changed = {name: text.replace(*change) for name, text in texts.items()}
    assert changed != texts
    assert code(write("script", **changed).train) != before


@pytest.mark.parametrize(
    "script",
    [
        "import nets\ndef train(run):\n    return nets.build()",
        "def train(run):\n    import nets\n    return nets.build()",
        "def train(run):\n    from nets import build\n    return build()",
        "def train(run):\n    import nets\n    return [lambda: nets.build() for _ in run]",
    ],
)
def test_only_the_imported_member_of_a_module_is_in_the_key(script: str, write: Write) -> None:
    before = code(write("script", script=script, nets=NETS, parts=PARTS).train)
    assert code(write("script", nets=NETS.replace("return 2", "return 3")).train) == before
    assert code(write("script", nets=NETS.replace("WIDTH = 3", "WIDTH = 4")).train) != before
    assert code(write("script", nets=NETS, parts=PARTS.replace("* 2", "* 3")).train) != before


@pytest.mark.parametrize(
    "script",
    [
        "def train(run):\n    from pkg import conv\n    return vars(conv)",
        "import pkg\ndef train(run):\n    return getattr(pkg, run.hp['arch'])",
        "import pkg.conv\ndef train(run):\n    return pkg",
        "def train(run):\n    import pkg.conv\n    return pkg.conv, pkg",
    ],
)
def test_submodules_of_a_package_used_as_a_whole_are_in_the_key_even_if_not_imported(script: str, write: Write) -> None:
    conv = "def build():\n    from parts import layer\n    return layer(1)\n"
    before = code(write("script", script=script, pkg____init__="", pkg__conv=conv, parts=PARTS).train)
    module = write("script")
    importlib.import_module("pkg.conv")
    assert code(module.train) == before
    assert code(write("script", pkg__conv=conv.replace("(1)", "(2)")).train) != before
    assert code(write("script", pkg__conv=conv, parts=PARTS.replace("* 2", "* 3")).train) != before


def test_modules_that_import_each_other_have_an_identity(write: Write) -> None:
    texts = {
        "script": "def train(run):\n    import one\n    return vars(one)",
        "one": "import two\ndef a(): return vars(two)",
        "two": "import one\ndef b(): return 1, one",
    }
    before = code(write("script", **texts).train)
    assert code(write("script", **texts).train) == before
    assert code(write("script", two=texts["two"].replace("return 1", "return 2")).train) != before


def test_the_key_holds_the_loaded_code_and_not_the_current_content_of_files(write: Write) -> None:
    script = "import nets\ndef train(run):\n    return nets.other()"
    old = write("script", script=script, nets=NETS, parts=PARTS)
    before = code(old.train)
    write("script", importing=False, nets=NETS.replace("return 2", "return 300"))
    assert code(old.train) == before
    assert code(write("script").train) != before


def test_a_module_used_as_a_whole_is_refused_if_it_was_edited_after_its_import(write: Write) -> None:
    old = write("script", script=WHOLE["by getattr"], nets=NETS, parts=PARTS)
    write("script", importing=False, nets=NETS.replace("return 2", "return 300"))
    with pytest.raises(UsageError, match=r"nets\.other differs from its source.*nets\.py was edited.*Restart"):
        identify(old.train)
    old.train.version = "1"
    assert code(old.train) == "version 1"


def test_swapping_two_functions_with_the_same_name_changes_the_key(write: Write) -> None:
    script = """
        loss = lambda x: x * x
        penalty = lambda x: abs(x)
        def make(width):
            def layer(x): return x * width
            return layer
        first, second = make(1), make(2)
        def train(run):
            return loss(run) + 2 * penalty(run) + first(second(run))
        """
    before = code(write("script", script=script).train)
    swapped = script.replace("loss =", "x =").replace("penalty =", "loss =").replace("x =", "penalty =")
    assert code(write("script", script=swapped).train) != before
    assert code(write("script", script=script.replace("first, second", "second, first")).train) != before


def test_the_order_of_a_dict_is_in_the_key(write: Write) -> None:
    script = "LAYERS = {'a': 1, 'b': 2}\ndef train(run): return LAYERS"
    before = code(write("script", script=script).train)
    assert code(write("script", script=script.replace("'a': 1, 'b': 2", "'b': 2, 'a': 1")).train) != before


def test_code_that_driver_and_worker_both_have_must_be_equal_but_a_worker_may_have_more(write: Write) -> None:
    script = "import nets\ndef train(run):\n    import workers_only\n    return nets.other()"
    here = identify(write("script", script=script, nets=NETS, parts=PARTS).train).loaded
    there = identify(write("script", workers_only="import nets\ndef f(): return 1").train).loaded
    assert differences(here, there) == []
    assert differences(there, here) != []
    edited = identify(write("script", nets=NETS.replace("return 2", "return 3")).train).loaded
    assert differences(here, edited) == ["nets.other"]


def test_constants_must_be_equal_on_driver_and_worker_but_computed_values_may_differ(write: Write) -> None:
    nets = """
        import os, torch
        GAIN = 1
        WHERE = os.environ.get("HPSTAGE_TEST_WHERE", "here")
        class Net:
            width = 3
            device = torch.device(WHERE)
            def forward(self, x): return x * GAIN, os.environ["HOME"], self.width, WHERE
        """
    script = "import nets\ndef train(run):\n    return nets.Net().forward(run)"

    def loaded(where: str, text: str) -> dict[str, str]:
        with pytest.MonkeyPatch.context() as context:
            context.setenv("HPSTAGE_TEST_WHERE", where)
            return identify(write("script", script=script, nets=text).train).loaded

    here = loaded("cpu", nets)
    assert differences(here, loaded("cuda", nets)) == []
    assert drifts(here, loaded("cuda", nets)) == ["nets.Net.device", "nets.WHERE"]
    assert differences(here, loaded("cpu", nets.replace("GAIN = 1", "GAIN = 100"))) == ["nets.GAIN"]
    assert differences(here, loaded("cpu", nets.replace("width = 3", "width = 4"))) == ["nets.Net.width"]


def test_versions_of_python_and_packages_must_be_equal_on_driver_and_worker() -> None:
    here = {"Python": "3.11", "package torch": "2.13.0", "package numpy": "2.4.0", "nets.build": "a"}
    assert differences(here, {**here, "package numpy": "2.3.0"}) == ["package numpy (2.4.0 here, 2.3.0 there)"]
    assert differences({**here, "package numpy": "absent"}, here) == []
    assert differences(here, {**here, "package numpy": "absent"}) == ["package numpy (2.4.0 here, absent there)"]
    assert differences(here, {**here, "Python": "3.12", "nets.build": "b"}) == ["Python (3.11 here, 3.12 there)"]


SCRIPT = """
import abc, dataclasses, enum, functools, sys, typing
from collections import namedtuple
import cloudpickle
import numpy as np
import nets

class Mode(enum.Enum):
    FAST = 1
    SLOW = "two"

class Level(enum.IntEnum):
    LOW = 1

@dataclasses.dataclass(frozen=True)
class Options:
    depth: int = 2
    tags: list = dataclasses.field(default_factory=list)
    mode: Mode = Mode.FAST

Pair = namedtuple("Pair", "a b")

class Point(typing.NamedTuple):
    x: int
    y: float = 0.5

class Base(abc.ABC):
    @abc.abstractmethod
    def model(self): ...

T = typing.TypeVar("T")

class Holder(typing.Generic[T]):
    __slots__ = ("one",)

DEFAULTS = {"b": Options(), "a": Pair(1, 2)}
TABLE = np.arange(6.0).reshape(2, 3)
SEEN = set()
act = lambda x: max(x, 0)

def twice(function):
    @functools.wraps(function)
    def wrapper(*arguments, **named):
        return 2 * function(*arguments, **named)
    return wrapper

@twice
def cached(x):
    return x + 1

class Trainable(Base):
    rate: float = 0.5
    level = Level.LOW

    def __init__(self):
        self.options = Options(3)
        self.make = twice
        self.point = Point(1)

    @twice
    def model(self):
        try:
            assert self.rate, "message"
            return [act(x) + cached(x) for x in TABLE] + [nets.build(), getattr(nets, "other")(), Holder, DEFAULTS]
        except (ValueError, KeyError) as error:
            return super().model(), error
        finally:
            SEEN.add(1)

    @property
    def half(self):
        class Inner:
            '''Inside.'''
            def f(self): return {"a", "b", "c"}, __class__
        return self.rate / 2, Inner, lambda: (yield self)

    @staticmethod
    def fixed(*, a=1, **more): return a, more

if __name__ == "__main__":
    from hpstage.training.identity.code_identity import identify
    trainable = Trainable()
    with open(sys.argv[1], "wb") as file:
        file.write(cloudpickle.dumps((trainable, identify(trainable))))
"""


def test_a_script_has_the_same_identity_on_a_worker_as_in_the_driver(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "parts.py").write_text(PARTS)
    worker = (
        "import pickle, sys, cloudpickle\n"
        "from hpstage.training.identity.code_identity import identify\n"
        "with open(sys.argv[1], 'rb') as file: trainable, _ = pickle.load(file)\n"
        "with open(sys.argv[2], 'wb') as file: file.write(cloudpickle.dumps(identify(trainable)))\n"
    )
    for seed, words in (("1", ["script.py", "sent"]), ("2", ["-c", worker, "sent", "received"])):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    reader = (
        "import pickle\n"
        "with open('sent', 'rb') as file: _, here = pickle.load(file)\n"
        "with open('received', 'rb') as file: there = pickle.load(file)\n"
        "from hpstage.training.identity.code_identity import differences\n"
        "assert not differences(here.loaded, there.loaded), differences(here.loaded, there.loaded)\n"
        "assert here == there, (here.described, there.described)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", reader], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def asserting(run: Any) -> Any:
    assert run.hp["lr"] > 0, "a learning rate is above zero"
    return lambda: [step + 1 for step in run.steps()]


def test_assertions_rewritten_by_pytest_do_not_change_the_identity() -> None:
    program = (
        "import cloudpickle, sys\n"
        "from hpstage.training.identity.code_identity import identify\n"
        f"from {__name__} import asserting\n"
        "sys.stdout.buffer.write(cloudpickle.dumps(identify(asserting)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True, timeout=300)
    plain: Identity = cloudpickle.loads(done.stdout)
    assert differences(identify(asserting).loaded, plain.loaded) == []
    assert identify(asserting) == plain


LOOKED_UP = """
import functools, importlib, sys
from importlib import import_module
import torch

class Base: pass

class Small(Base):
    def forward(self): return 2

class ChainBuilder(torch.nn.Linear):
    def forward(self, x): return x * 2

class Trainable:
    def train(self, hp): return {how}
"""
LOOKUPS = [
    "globals()[hp['arch']]()",
    "getattr(sys.modules[__name__], hp['arch'])()",
    "getattr(importlib.import_module(__name__), hp['arch'])()",
    "eval(hp['arch'])()",
    "exec(hp['arch'])",
    "[cls() for cls in Base.__subclasses__()]",
    "[cls(1, 1) for cls in torch.nn.Linear.__subclasses__()]",
    "[cls() for cls in hp['base'].__subclasses__()]",
    "hp['function'].__globals__[hp['arch']]()",
    "(lambda: globals()[hp['arch']]())()",
]


@pytest.mark.parametrize("how", LOOKUPS)
@pytest.mark.ci_one_in(2)
def test_a_module_whose_names_are_looked_up_by_strings_is_in_the_key_as_a_whole(how: str, write: Write) -> None:
    script = LOOKED_UP.format(how=how)
    before = code(write("script", script=script).Trainable())
    remarked = script.replace("class Small(Base):", "# a comment\n\nclass Small(Base):\n    '''Small.'''")
    assert code(write("script", script=remarked).Trainable()) == before
    for edited in (script.replace("return 2", "return 3"), script.replace("x * 2", "x * 3")):
        assert code(write("script", script=edited).Trainable()) != before


def test_subclasses_in_other_modules_are_in_the_key_if_the_code_looks_up_subclasses(write: Write) -> None:
    script = "import base, small\ndef train(run): return [cls() for cls in base.Base.__subclasses__()]"
    small = "import base\nclass Small(base.Base):\n    def forward(self): return 2"
    before = code(write("script", script=script, base="class Base: pass", small=small).train)
    assert code(write("script").train) == before
    assert code(write("script", small=small.replace("return 2", "return 3")).train) != before


@pytest.mark.parametrize(
    "how",
    [
        "importlib.import_module('helper').Small()",
        "import_module('helper').Small()",
        "__import__('helper').Small()",
        "sys.modules['helper'].Small()",
        "importlib.import_module(hp['module']).Small()",
        "importlib.import_module('pkg.' + hp['module']).Small()",
        "importlib.import_module(f'pkg.{hp}').Small()",
        "[importlib.import_module(name) for name in ('pkg.small', 'pkg.large')]",
    ],
)
@pytest.mark.ci_one_in(2)
def test_a_module_imported_by_its_name_as_a_string_is_in_the_key_as_a_whole(how: str, write: Write) -> None:
    script, small = LOOKED_UP.format(how=how), "class Small:\n    def forward(self): return 2"
    texts = {"script": script, "helper": small, "pkg____init__": "", "pkg__small": small}
    before = code(write("script", **texts).Trainable())
    importlib.import_module("helper" if "helper" in how else "pkg.small")
    assert code(sys.modules["script"].Trainable()) == before  # type: ignore[attr-defined]
    edited = small.replace("return 2", "return 3")
    assert code(write("script", **{**texts, "helper": edited, "pkg__small": edited}).Trainable()) != before


def test_code_that_returns_import_module_has_an_identity(write: Write) -> None:
    """It was an internal error: nothing but the return follows."""
    script = "from importlib import import_module\ndef importer(): return import_module\ndef train(run): importer()"
    before = code(write("script", script=script).train)
    assert code(write("script", script=script + "('helper')", helper="").train) != before


def test_a_package_is_in_the_key_if_its_code_imports_modules_by_computed_names(write: Write) -> None:
    texts = {
        "pkg____init__": "",
        "pkg__build": "import importlib\ndef train(hp): return importlib.import_module('.' + hp, __package__)",
        "pkg__small": "def forward(x): return x * 2",
    }
    before = code(write("pkg.build", **texts).train)
    assert code(write("pkg.build").train) == before
    assert code(write("pkg.build", pkg__small="def forward(x): return x * 3").train) != before


MADE = {
    "a function in TorchScript": "import torch\n@torch.jit.script\ndef act(x):\n    return x * 2.0",
    "a traced function": "import torch\nact = torch.jit.trace(lambda x: x * 2.0, torch.ones(1))",
    "a module in TorchScript": """
        import torch
        class Act(torch.nn.Module):
            def forward(self, x): return x * 2.0
        act = torch.jit.script(Act())
        """,
    "what TorchScript calls": """
        import torch
        def inner(x): return x * 2.0
        @torch.jit.script
        def act(x): return inner(x)
        """,
    "numpy.frompyfunc": "import numpy\nact = numpy.frompyfunc(lambda x: x * 2.0, 1, 1)",
    "numpy.vectorize": "import numpy\nact = numpy.vectorize(lambda x: x * 2.0)",
    "a context variable": "import contextvars\nact = contextvars.ContextVar('act', default=2.0)",
    "a context variable that is set": "import contextvars\nact = contextvars.ContextVar('act')\nact.set(2.0)",
    "a metaclass": """
        class Meta(type):
            def __call__(cls, *a): return 2.0
        class act(metaclass=Meta): pass
        """,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("helper", MADE.values(), ids=MADE)
@pytest.mark.ci_one_in(2)
def test_user_code_wrapped_by_a_library_is_in_the_key(helper: str, write: Write) -> None:
    script = "import helper\ndef train(run): return helper.act"
    before = code(write("script", script=script, helper=helper).train)
    assert code(write("script", helper=f"# a comment\n\n{textwrap.dedent(helper)}").train) == before
    assert code(write("script", helper=helper.replace("2.0", "3.0")).train) != before


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_torchscript_function_that_differs_on_a_worker_is_named(write: Write) -> None:
    script, helper = "import helper\ndef train(run): return helper.act", MADE["a function in TorchScript"]
    here = identify(write("script", script=script, helper=helper).train).loaded
    there = identify(write("script", helper=helper.replace("2.0", "3.0")).train).loaded
    assert differences(here, there) == ["helper.act"]


MAIN = """
import time
from importlib import import_module
import cloudpickle, sys
from nets import Net

GAIN = 1
started = time.time()

class Small:
    def forward(self): return 2

class Trainable:
    def train(self, hp): return globals()[hp["arch"]]()

def space(trial): return 4

if __name__ == "__main__":
    from hpstage.training.identity.code_identity import identify
    study = object()
    print(identify(Trainable()).described["code"])
    with open("sent", "wb") as file:
        file.write(cloudpickle.dumps((Trainable(), identify(Trainable()))))
"""


def test_a_script_with_names_looked_up_by_strings_is_in_the_key_without_its_run_time_values(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}

    def run(*words: str, **texts: str) -> str:
        for name, text in {"script": MAIN, "nets": NETS, "parts": PARTS, **texts}.items():
            (tmp_path / f"{name}.py").write_text(text)
        done = subprocess.run(
            [sys.executable, "-B", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    before = run("script.py")
    assert run("script.py", script=MAIN.replace("import time", "# a comment\nimport time")) == before
    for edited in (
        {"script": MAIN.replace("return 2", "return 3")},
        {"script": MAIN.replace("GAIN = 1", "GAIN = 2")},
        {"nets": NETS.replace("return 5", "return 6")},
    ):
        assert run("script.py", **edited) != before
    # A worker has of a script only what was sent; that is no difference in what it was sent.
    run("script.py")
    worker = (
        "import pickle\n"
        "from hpstage.training.identity.code_identity import differences, identify\n"
        "with open('sent', 'rb') as file: trainable, here = pickle.load(file)\n"
        "print(differences(here.loaded, identify(trainable).loaded))\n"
    )
    assert run("-c", worker) == "[]\n"
