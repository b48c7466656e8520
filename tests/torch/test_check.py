"""``hpstage check`` names what is not exact, and raises no alarm over what is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from typer.testing import CliRunner

import hpstage
from hpstage import schedule as s
from hpstage.checking import Children
from hpstage.checking.findings import Way
from hpstage.cli.app import app
from hpstage.cli.naming import send_along, space_named, trainable_named
from hpstage.errors import UsageError
from hpstage.training.run import Run
from tests.torch.backends.slips import Clamps
from tests.torch.faults import EXACT, HELD, NAMED, Own, in_the_environment
from tests.torch.patterns import PATTERNS
from tests.torch.test_endings import stopping
from tests.torch.test_measure import Costly, Silent
from tests.torch.test_pickles import Plainly
from tests.torch.test_pickles import space as of_estimators
from tests.torch.test_references_to_itself import Table
from tests.torch.trainables import CASES, Small, network, samples, sgd

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]


def space(trial: optuna.Trial) -> dict[str, Any]:
    drop = trial.suggest_categorical("drop", [3, 4])
    wide = trial.suggest_categorical("wide", [False, True])  # False in the trial that seed 0 checks, True in the other
    lr = s.multistep(0.2 if wide else 0.1, [drop], gamma=0.1)
    return {"lr": lr, "momentum": 0.9, "batch_size": 8, "seed": 3, "wide": wide, "scale": 2.0}


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    # Each of a hundred processes would import these once more.
    with Children(["numpy", "torch", "sklearn.datasets", "tests.torch.faults", "tests.torch.test_pickles"]) as shared:
        yield shared


@pytest.fixture
def check(children: Children) -> Callable[..., hpstage.CheckReport]:
    def check(trainable: object, **options: Any) -> hpstage.CheckReport:
        return hpstage.check(trainable, space, **{"steps": 5, "n_forks": 1, "children": children, **options})

    return check


def one_line(text: object) -> str:
    return " ".join(str(text).split())


# Found, refused and named as others here: as what a local variable holds, as an iterator, as a name in the code.
EQUAL = {
    *list(HELD)[2:],
    "a DataLoader's iterator in a local variable",
    "a generator function",
    "an address",
    "entropy",
}
EQUAL |= {"the position of a reader", "hash() of a string"}
EQUAL |= {"a generator without a seed", "seeding by the clock", "a thread during training", "seeding with a constant"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in EQUAL else []) for n in NAMED])
def test_check_names_the_cause_of_a_fault(check: Callable[..., hpstage.CheckReport], name: str) -> None:
    make, match = NAMED[name]
    report = check(make())
    assert not report.ok
    # By the first difference that is reported, which is the likely cause of all others.
    assert re.search(match, one_line(report.differences[0])), str(report)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] if n in EQUAL or n not in EXACT else [])
        for n in (*EXACT, *CASES, *PATTERNS)
    ],
)
def test_check_finds_no_difference_in_exact_training(check: Callable[..., hpstage.CheckReport], name: str) -> None:
    report = check({**CASES, **PATTERNS, **EXACT}[name]())
    assert report.ok, str(report)
    assert all(way.verdict == "equal" for way in report.ways)


OPTIMIZERS: dict[str, Callable[[Any, Any], torch.optim.Optimizer]] = {
    "adamw, foreach, maximize": lambda p, hp: torch.optim.AdamW(p, lr=hp["lr"], foreach=True, maximize=True),
    "adam, amsgrad, fused": lambda p, hp: torch.optim.Adam(p, lr=hp["lr"], amsgrad=True, fused=True),
    "nadam": lambda p, hp: torch.optim.NAdam(p, lr=hp["lr"]),
    "adafactor": lambda p, hp: torch.optim.Adafactor(p, lr=hp["lr"]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.one_in(4)
def test_check_finds_no_difference_with_optimizers_of_torch(
    check: Callable[..., hpstage.CheckReport], name: str
) -> None:
    report = check(Small(OPTIMIZERS[name]))
    assert report.ok, str(report)


def test_check_finds_no_difference_in_a_trainable_that_saves_its_own_state(
    check: Callable[..., hpstage.CheckReport],
) -> None:
    report = check(Own())
    assert report.ok, str(report)


def test_check_finds_no_difference_if_an_attribute_holds_a_bound_method(
    check: Callable[..., hpstage.CheckReport],
) -> None:
    report = check(Table())
    assert report.ok, str(report)


def drawing_to_measure(run: Run) -> None:
    """Measures on batches drawn at random, as nanoGPT does: generators are keyed before the next step."""
    x, y = samples()
    model = network()
    optimizer = sgd(model.parameters(), run.hp)
    run.attach(model=model, optimizer=optimizer)
    for _ in run.steps():
        batch = torch.randint(len(x), (8,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        if run.wants_report:
            drawn = torch.randint(len(x), (8,))
            model.eval()
            run.report(loss=torch.nn.functional.cross_entropy(model(x[drawn]), y[drawn]).item())
            model.train()


def test_check_finds_no_difference_if_evaluation_draws_random_numbers(
    check: Callable[..., hpstage.CheckReport],
) -> None:
    report = check(drawing_to_measure, steps=3, n_forks=1)
    assert report.ok, str(report)


def test_check_does_not_compare_metrics_that_are_declared_noisy(check: Callable[..., hpstage.CheckReport]) -> None:
    assert check(Costly(), steps=3).ok
    report = check(Silent(), steps=3)
    assert {finding.what for finding in report.differences} == {"the metric latency"}
    assert "noisy" in report.differences[0].remedy


def test_check_reports_a_pickle_in_the_state_with_a_replacement(children: Children) -> None:
    report = hpstage.check(Plainly("linear"), of_estimators, steps=5, n_forks=1, children=children)
    assert not report.ok
    assert any("hpstage.pickled" in finding.remedy for finding in report.differences), report


def test_a_check_report_of_one_step_uses_the_singular() -> None:
    assert Way("forked from disk", "equal", 1, 0.5).cells()[2] == "1 step"


def test_a_check_report_names_step_tensor_cause_and_remedy(check: Callable[..., hpstage.CheckReport]) -> None:
    report = check(in_the_environment(), steps=6, n_forks=2)
    finding = report.differences[0]
    assert (finding.way, finding.verdict, finding.what) == ("forked from memory", "differs", "model.0.weight")
    assert finding.fork in report.forks
    assert finding.step == finding.fork + 1
    assert finding.straight != finding.found
    assert "model.5.bias" in finding.others  # that of a convolution before BatchNorm has no gradient but rounding
    text = one_line(report)
    assert f"first differs begun at step {finding.fork}, after step {finding.step}" in text
    assert "is NOT exact" in text and "run.attach" in finding.remedy and finding.cause in text
    assert json.loads(json.dumps(report.as_dict()))["differences"][0]["what"] == "model.0.weight"


def test_check_refuses_a_changing_local_variable_that_no_state_can_hold(
    check: Callable[..., hpstage.CheckReport],
) -> None:
    finding = check(NAMED["a DataLoader's iterator in a local variable"][0]()).differences[0]
    assert (finding.way, finding.verdict) == ("straight through", "refused")
    assert re.search("local variable batches.* (Or attach `batches`|has moved on)", one_line(finding))


def test_check_trains_past_the_first_milestone_of_a_schedule_if_it_is_near(children: Children) -> None:
    def late(trial: optuna.Trial) -> dict[str, Any]:
        return {"lr": s.multistep(0.1, [trial.suggest_categorical("drop", [9, 500])], gamma=0.1), "batch_size": 8}

    def ending(trial: optuna.Trial) -> dict[str, Any]:
        return {"lr": s.constant(0.1).until(3), "batch_size": 8}

    assert hpstage.check(Own(), late, n_forks=1, children=children).steps == 12
    assert hpstage.check(Own(), ending, n_forks=9, children=children).forks == (1, 2)


def test_check_reports_failing_code_with_its_traceback(check: Callable[..., hpstage.CheckReport]) -> None:
    class Failing(Small):
        def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
            raise ZeroDivisionError("no samples")

    report = check(Failing())
    assert report.ways[0].verdict == "failed"
    assert "ZeroDivisionError: no samples" in report.differences[0].cause
    assert "conduct.py" not in report.differences[0].cause


def test_check_suggests_fewer_steps_if_training_ends_itself(children: Children) -> None:
    def search(trial: optuna.Trial) -> dict[str, object]:
        return {"lr": 0.3}

    report = hpstage.check(stopping, search, steps=30, children=children)
    assert "training ended itself in step 5, as complete" in str(report) and "with steps=5" in str(report)


def test_check_reports_the_exit_status_of_a_process_that_dies(check: Callable[..., hpstage.CheckReport]) -> None:
    def dying(run: Run) -> None:
        import os

        print("about to die", flush=True)  # noqa: T201
        os._exit(7)

    report = check(dying)
    assert "the process left with exit status 7, and had printed: about to die" in one_line(report)


def test_check_compares_another_step_backend_with_eager_steps(check: Callable[..., hpstage.CheckReport]) -> None:
    subject = Small()
    report = check(subject, numerics="stacked", steps=3)
    assert report.ok, report
    assert "stacked-v3: 2 steps compared with eager ones; the largest difference is" in str(report)
    assert subject.numerics == "eager" and "numerics" not in vars(subject)
    assert "compared with eager" not in str(check(Small(), steps=3))


def test_check_reports_a_step_backend_that_does_not_train_as_the_code_says(children: Children) -> None:
    report = hpstage.check(
        Clamps(), lambda trial: {"lr": 0.05}, steps=3, n_forks=1, numerics="stacked", children=children
    )
    assert not report.ok
    assert re.search(
        r"'stacked' does not train Clamps as its code says: .* model\.\S+ is \S+, and \S+ by", one_line(report)
    )


def test_check_refuses_a_step_backend_for_a_training_function(check: Callable[..., hpstage.CheckReport]) -> None:
    with pytest.raises(
        UsageError, match=r"numerics = 'compiled', which only a hpstage\.torch\.TorchTrainable can have"
    ):
        check(in_the_environment, numerics="compiled")


def test_check_refuses_invalid_arguments() -> None:
    with pytest.raises(UsageError, match="steps is 1; give a whole number from 2 to 10,000"):
        hpstage.check(Own(), space, steps=1)
    with pytest.raises(UsageError, match="n_forks is 0"):
        hpstage.check(Own(), space, n_forks=0)
    with pytest.raises(UsageError, match="int cannot be trained"):
        hpstage.check(3, space)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpstage", "check", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("trainable", "script"),
    [("LinearDigits", "example_sklearn"), ("train", "example_function"), ("Digits", "demo_digits")],
)
@pytest.mark.one_in(3)
def test_check_finds_no_difference_in_the_demo_and_the_examples(
    trainable: str, script: str, children: Children
) -> None:
    named, its_space = f"{ROOT}/scripts/{script}.py:{trainable}", f"{ROOT}/scripts/{script}.py:space"
    subject = trainable_named(named)
    send_along(named)
    report = hpstage.check(subject, space_named(its_space), steps=3, children=children)
    assert report.ok, str(report)


@pytest.mark.slow  # three processes import torch
def test_the_check_command_shows_progress_and_exits_with_0_for_exact_training() -> None:
    done = command("scripts/demo_digits.py:Digits", "scripts/demo_digits.py:space", "--steps", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Digits is exact" in done.stdout
    assert "3 steps straight through, forks at 1, 2" in done.stderr


# Without torch, which takes long to import.
PLAIN = """
import time

class Own:
    def setup(self, hp): self.value = 0.0
    def train(self, step, hp): self.value += hp["rate"]
    def evaluate(self): return {"loss": self.value}
    def state_dict(self): return {"value": self.value}
    def load_state_dict(self, state): self.value = state["value"]

class Clock(Own):
    def train(self, step, hp): self.value += time.time() % 1

def space(trial): return {"rate": trial.suggest_float("rate", 0.1, 0.2)}
"""


def test_the_check_command_exits_with_0_for_exact_training_and_otherwise_with_1_and_a_report(
    tmp_path: Path,
) -> None:
    script, file = tmp_path / "plain.py", tmp_path / "check.json"
    script.write_text(PLAIN)
    done = command(f"{script}:Own", f"{script}:space", "--steps", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Own is exact" in done.stdout
    assert "3 steps straight through, forks at 1, 2" in done.stderr
    done = command(f"{script}:Clock", f"{script}:space", "--steps", "3", "--json", str(file))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Clock is NOT exact" in done.stdout
    assert "names time.time" in one_line(done.stdout)
    written = json.loads(file.read_text())
    assert (written["ok"], written["subject"]) == (False, "Clock")


def test_the_check_command_exits_with_2_if_it_cannot_check() -> None:
    done = CliRunner().invoke(app, ["check", "tests.torch.faults:Nothing", "tests.torch.test_check:space"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "has no Nothing" in done.stderr
