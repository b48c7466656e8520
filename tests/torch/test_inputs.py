"""What training reads and its key does not cover: named once, and refused once it is another."""

from __future__ import annotations

import argparse
import glob
import json
import os
import pickle
import sqlite3
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import optuna
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import Dataset, TensorDataset

import hpstage
from hpstage.checkpoints.folder import FolderPlace
from hpstage.driver import inputs
from hpstage.errors import StoreError
from hpstage.training.identity import watching
from hpstage.training.identity.inputs import Inputs
from tests.torch import reading

pytestmark = pytest.mark.sampled(16)

optuna.logging.set_verbosity(optuna.logging.ERROR)

FOLDER = Path("data")
NAME, KEY = "scale", "HPSTAGE_TEST_SCALE"
DEFAULTS = argparse.Namespace(folder="data", suffix=".txt")


class Tiny(hpstage.torch.TorchTrainable):
    """Trains a number, and reads another somewhere."""

    device = "cpu"

    def model(self, hp: Any) -> Any:
        return torch.nn.Linear(1, 1)

    def optimizer(self, model: Any, hp: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"])

    def dataset(self) -> Any:
        return TensorDataset(torch.ones(8, 1))

    def scale(self) -> float:
        return 1.0

    def loss(self, model: Any, batch: Any) -> Any:
        return model(batch[0]).mean() * self.scale()

    def evaluate(self, model: Any) -> dict[str, float]:
        return {"loss": float(model(torch.ones(1, 1)))}


def number(path: str | Path) -> float:
    with open(path) as file:
        return float(file.read())


def by_default(path: str = "data/scale.txt") -> float:
    return float(Path(path).read_text())


def by_two_names(folder: str, name: str) -> float:
    return float((Path(folder) / name).read_text())


def from_database(path: str) -> float:
    with sqlite3.connect(path) as database:
        found = database.execute("select scale from scales").fetchone()
    database.close()
    return float(found[0])


def from_table() -> float:
    with h5py.File("data/scale.h5") as table:
        return float(table["scale"][()])


HELD: list[Any] = []


def held(path: str) -> float:
    if not HELD:
        HELD.append(torch.from_file(path, shared=False, size=1, dtype=torch.float64))
    return float(HELD[0][0])


def from_pool(names: list[str]) -> float:
    with ThreadPoolExecutor(1) as pool:
        return next(pool.map(number, names))


def mapped(path: str) -> float:
    return float(np.memmap(path, dtype=np.float64)[0])


def parsed() -> float:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=float, default=1.0)
    return float(parser.parse_args().scale)


def if_there(path: str) -> float:
    try:
        return number(path)
    except FileNotFoundError:
        return 1.0


def by_descriptor(path: str) -> float:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return float(os.read(descriptor, 100))
    finally:
        os.close(descriptor)


def executed(path: str) -> float:
    names: dict[str, Any] = {}
    exec(Path(path).read_text(), names)
    return float(names["SCALE"])


READ: dict[str, Callable[[], float]] = {
    "a literal given to a helper": lambda: number("data/scale.txt"),
    "a default argument": by_default,
    "a path divided": lambda: number(Path("data") / "scale.txt"),
    "two arguments divided": lambda: by_two_names("data", "scale.txt"),
    "a global path divided": lambda: float((FOLDER / "scale.txt").read_text()),
    "an f-string": lambda: number(f"data/{NAME}.txt"),
    "joined globals": lambda: number(os.path.join(FOLDER, NAME + ".txt")),
    "defaults of arguments": lambda: number(os.path.join(DEFAULTS.folder, NAME + DEFAULTS.suffix)),
    "json": lambda: float(json.loads((FOLDER / "scale.json").read_bytes())["scale"]),
    "numpy": lambda: float(np.load(FOLDER / "scale.npy")),
    "numpy, all of a folder": lambda: sum(float(np.load(path)) for path in sorted(FOLDER.glob("*.npy"))),
    "numpy from a text": lambda: float(np.loadtxt(FOLDER / "scale.txt")),
    "numpy, mapped": lambda: mapped(f"data/{NAME}.raw"),
    "torch": lambda: float(torch.load(FOLDER / "scale.pt")),
    "torch, mapped": lambda: float(torch.load(f"data/{NAME}.pt", mmap=True)),
    "pickle": lambda: float(pickle.loads((FOLDER / "scale.pkl").read_bytes())),  # noqa: S301
    "tensors read in C": lambda: float(load_file("data/scale.safetensors")["scale"]),
    "a table read in C": from_table,
    "a mapped file held in C": lambda: held(f"data/{NAME}.raw"),
    "a database": lambda: from_database(f"data/{NAME}.sqlite"),
    "the first of a folder": lambda: number(sorted(glob.glob("data/*.txt"))[0]),
    "how many there are": lambda: float(len(os.listdir("data/many"))),
    "how many there are, by glob": lambda: float(len(list(FOLDER.joinpath("many").iterdir()))),
    "a file descriptor": lambda: by_descriptor(f"data/{NAME}.txt"),
    "another thread": lambda: from_pool([f"data/{NAME}.txt"]),
    "a file that may be there": lambda: if_there(f"data/{NAME}_override.txt"),
    "code that is executed": lambda: executed(f"data/{NAME}.py"),
    "another module": lambda: reading.scale(),
    "arguments, parsed": parsed,
    "an argument": lambda: float((sys.argv[2:] or ["1"])[0]),
    "a variable": lambda: float(os.environ[KEY]),
    "a variable by getenv": lambda: float(os.getenv(KEY, "1")),
    "a variable by get": lambda: float(os.environ.get(KEY, "1")),
    "a variable in bytes": lambda: float(os.environb[KEY.encode()]),
    "a variable in another module": lambda: reading.variable(),
    "whether there is a variable": lambda: float("HPSTAGE_TEST_OTHER" in os.environ),
}


def write(scale: float) -> None:
    """Write the number in all the ways in which it is read."""
    FOLDER.joinpath("many").mkdir(parents=True, exist_ok=True)
    FOLDER.joinpath("scale.txt").write_text(str(scale))
    FOLDER.joinpath("scale.json").write_text(json.dumps({"scale": scale}))
    FOLDER.joinpath("scale.py").write_text(f"SCALE = {scale}")
    np.save(FOLDER / "scale.npy", scale)
    np.array([scale]).tofile(FOLDER / "scale.raw")
    torch.save(torch.tensor(scale), FOLDER / "scale.pt")
    FOLDER.joinpath("scale.pkl").write_bytes(pickle.dumps(scale))
    save_file({"scale": torch.tensor(scale)}, FOLDER / "scale.safetensors")
    with h5py.File(FOLDER / "scale.h5", "w") as table:
        table["scale"] = scale
    FOLDER.joinpath("scale.sqlite").unlink(missing_ok=True)
    with sqlite3.connect(FOLDER / "scale.sqlite") as database:
        database.execute("create table scales (scale real)")
        database.execute("insert into scales values (?)", (scale,))
    database.close()
    os.environ[KEY] = str(scale)
    sys.argv[1:] = ["--scale", str(scale)]
    if scale != 1.0:
        FOLDER.joinpath("scale_override.txt").write_text(str(scale))
        FOLDER.joinpath("many", "one").touch()
        os.environ["HPSTAGE_TEST_OTHER"] = "1"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    for name in (KEY, "HPSTAGE_TEST_OTHER"):
        monkeypatch.setenv(name, "1")  # so that it is undone
        monkeypatch.delenv(name)
    write(1.0)
    return tmp_path


def search(trainable: object, store: str = "store", n_trials: int = 1, **arguments: Any) -> float:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    hpstage.optimize(
        study,
        trainable,
        lambda trial: {"lr": trial.suggest_float("lr", 0.01, 0.1), "batch_size": 4},
        metric="loss",
        n_trials=n_trials,
        store=store,
        **{"steps": 2, "executor": hpstage.InlineExecutor(), "verify": "off", **arguments},
    )
    return study.best_value


def in_loss(read: Callable[[], float]) -> Tiny:
    class InLoss(Tiny):
        def scale(self) -> float:
            return read()

    return InLoss()


@pytest.mark.parametrize("read", READ.values(), ids=READ)
@pytest.mark.ci_one_in(3)
def test_a_store_is_refused_if_an_input_that_training_reads_has_changed(read: Any, folder: Path) -> None:
    before = search(in_loss(read))
    assert search(in_loss(read)) == before
    write(2.0)
    with pytest.raises(StoreError, match=r"scale|SCALE|OTHER|many|files|data|argv"):
        search(in_loss(read))


def test_command_line_options_that_a_compiler_reads_are_not_an_input(folder: Path) -> None:
    names = {"__name__": "jax._src.cache_key"}
    exec("import sys\ndef flags(): return float(len([one for one in sys.argv if one.startswith('--xla')]))", names)
    before = search(in_loss(names["flags"]))  # type: ignore[arg-type]
    sys.argv[1:] = ["--other"]
    assert search(in_loss(names["flags"])) == before  # type: ignore[arg-type]


class InDataset(Tiny):
    def dataset(self) -> Any:
        return TensorDataset(torch.full((8, 1), number(f"data/{NAME}.txt")))


class Rows(Dataset[Any]):
    """Its rows are made from a file when they are read, after the 64 that are looked at, too."""

    def __init__(self, path: str) -> None:
        self.folder, self.name = os.path.split(path)

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        if index % 3 == 2:
            return (torch.full((1,), number(f"{self.folder}/{self.name}")),)
        return (torch.ones(1),)


class InRows(Tiny):
    def dataset(self) -> Any:
        return Rows(f"data/{NAME}.txt")


class InProcesses(InRows):
    num_workers = 1


class InDatasetAndLoss(InDataset):
    """The part of the file that only loss() reads is in no digest of the data."""

    def dataset(self) -> Any:
        json.loads(FOLDER.joinpath("scale.json").read_bytes())
        return super(InDataset, self).dataset()

    def scale(self) -> float:
        return float(json.loads(FOLDER.joinpath("scale.json").read_bytes())["scale"])


class InModel(Tiny):
    def model(self, hp: Any) -> Any:
        model = super().model(hp)
        with torch.no_grad():
            model.weight.fill_(number(f"data/{NAME}.txt"))
        return model


class InEvaluate(Tiny):
    def evaluate(self, model: Any) -> dict[str, float]:
        return {"loss": number(FOLDER / f"{NAME}.txt")}


class InInit(Tiny):
    def __init__(self) -> None:
        self.factor = number(FOLDER / f"{NAME}.txt")

    def scale(self) -> float:
        return self.factor


def in_a_loop(run: hpstage.Run) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=run.hp["lr"])
    run.attach(model=model, optimizer=optimizer)
    scale = number(f"data/{NAME}.txt")
    for _ in run.steps():
        optimizer.zero_grad()
        (model(torch.ones(1, 1)).mean() * scale).backward()
        optimizer.step()
        if run.wants_report:
            run.report(loss=scale)


class Own:
    """An object that defines its state itself."""

    def setup(self, hp: Any) -> None:
        self.value = number(f"data/{NAME}.txt")

    def train(self, step: int, hp: Any) -> None:
        self.value += hp["lr"]

    def evaluate(self) -> dict[str, float]:
        return {"loss": self.value}

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


PLACES: dict[str, Callable[[], Any]] = {
    "dataset()": InDataset,
    "samples": InRows,
    "samples, in other processes": InProcesses,
    "dataset() and loss()": InDatasetAndLoss,
    "model()": InModel,
    "evaluate()": InEvaluate,
    "__init__()": InInit,
    "a function": lambda: in_a_loop,
    "an object of five methods": Own,
}


@pytest.mark.parametrize("make", PLACES.values(), ids=PLACES)
def test_a_store_is_refused_if_a_file_read_by_any_method_of_training_has_changed(make: Any, folder: Path) -> None:
    before = search(make())
    assert search(make()) == before
    write(2.0)
    with pytest.raises(StoreError):
        search(make())


def test_a_changed_file_that_training_does_not_read_is_ignored(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = search(Tiny())
    write(2.0)
    assert search(Tiny()) == before
    assert "Training reads" not in caplog.text


def test_command_line_arguments_that_training_reads_are_logged_only_in_the_first_search(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_of_this_process", set())
    for store in ("one", "another"):
        search(in_loss(lambda: float((sys.argv[2:] or ["1"])[0])), store=store)
    assert caplog.text.count("Training reads") == 1


def test_a_file_that_training_reads_is_logged_once_with_the_remedy(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read = READ["an f-string"]
    for n_trials in (1, 2, 3):
        search(in_loss(read), n_trials=n_trials)
    [warning] = [record.getMessage() for record in caplog.records if "Training reads" in record.getMessage()]
    assert "Training reads data/scale.txt, which the workload's key does not cover" in warning
    assert all(remedy in warning for remedy in ("an attribute", "`data_version`", "`stateless`"))


def test_a_store_refused_for_a_changed_input_is_accepted_after_the_input_is_restored(folder: Path) -> None:
    read = READ["an f-string"]
    before = search(in_loss(read))
    write(2.0)
    with pytest.raises(StoreError, match=r"training reads data/scale\.txt, which changed"):
        search(in_loss(read), n_trials=2)
    write(1.0)
    assert search(in_loss(read)) == before


class Stated(Tiny):
    data_version = "1"

    def scale(self) -> float:
        return READ["an f-string"]()


class Ignored(Tiny):
    stateless = ("scale.txt", KEY)

    def scale(self) -> float:
        return number(f"data/{NAME}.txt") * float(os.environ[KEY])


@pytest.mark.parametrize("make", [Stated, Ignored], ids=["a stated version", "stateless"])
def test_inputs_covered_by_data_version_or_stateless_are_neither_logged_nor_compared(
    make: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = search(make())
    write(2.0)
    assert search(make()) == before
    assert "Training reads" not in caplog.text


class Writing(Tiny):
    """Writes, and reads what it has written."""

    def scale(self) -> float:
        os.makedirs("made", exist_ok=True)
        with open(f"made/{NAME}.txt", "a") as file:
            file.write("1")
        os.environ["HPSTAGE_TEST_OTHER"] = Path(f"made/{NAME}.txt").read_text()
        if not NAME:  # as a script that may resume
            Path("made/last.txt").read_text()
        Path("made/last.txt").write_text(os.environ["HPSTAGE_TEST_OTHER"])
        torch.save({"scale": 1.0}, f"made/{NAME}.pt")
        torch.load(f"made/{NAME}.pt")
        with sqlite3.connect(f"made/{NAME}.sqlite") as database:
            database.execute("create table if not exists results (scale real)")
            database.execute("insert into results values (1)")
        database.close()
        return 1.0 + len(os.listdir("made")) + float("HPSTAGE_TEST_OTHER" in os.environ)


def test_files_that_training_itself_writes_are_not_inputs(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for n_trials in (1, 2):
        search(Writing(), n_trials=n_trials)
    assert "Training reads" not in caplog.text


class Logging(Tiny):
    """Appends to a file that an attribute names."""

    def __init__(self) -> None:
        self.record = str(FOLDER / "losses.csv")

    def scale(self) -> float:
        with open(self.record, "a") as file:
            file.write("1\n")
        return 1.0


def test_a_file_that_training_writes_and_an_attribute_names_does_not_count_if_the_attribute_is_stateless(
    folder: Path,
) -> None:
    search(Logging())
    with pytest.raises(StoreError, match=r"files.* if training writes it, name the attribute in `stateless`"):
        search(Logging())

    class Named(Logging):
        stateless = ("record",)

    (FOLDER / "losses.csv").unlink()
    before = search(Named(), "other")
    assert search(Named(), "other") == before


class Settings(Tiny):
    """Code calls libraries and Python for much that is not an input."""

    def scale(self) -> float:
        import calendar  # noqa: F401
        import platform

        environment = dict(os.environ)
        environment.update(os.environ.copy())
        os.path.expanduser("~")
        platform.processor()
        Path("/proc/self/stat").read_text()
        return 1.0


def test_files_and_variables_that_libraries_read_are_not_inputs(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = search(Settings())
    os.environ["HPSTAGE_TEST_OTHER"] = "another"
    assert search(Settings()) == before
    assert "Training reads" not in caplog.text


def test_the_list_of_files_that_are_no_inputs_keeps_the_most_recent_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long-lived process opens its next store after any number of other files, and holds it open."""
    monkeypatch.setattr(watching, "_MOST", 3)
    monkeypatch.setattr(watching, "not_inputs", OrderedDict())
    for name in "abcad":
        watching._exclude(name)
    assert [*watching.not_inputs] == ["c", "a", "d"]


def test_a_worker_that_reads_different_content_of_an_input_ends_the_search(folder: Path) -> None:
    trainable = in_loss(READ["an f-string"])
    search(trainable)

    class Blind(hpstage.InlineExecutor):
        """Its workers cannot be reached before they train."""

        def look_at(self, inputs: Any) -> dict[str, str]:
            return {}

    write(2.0)
    with pytest.raises(StoreError, match=r"worker inline has read data/scale\.txt, with content that differs"):
        search(trainable, n_trials=2, executor=Blind())


@pytest.mark.ci
def test_workers_report_the_files_that_they_have_read(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with hpstage.local_cluster(1, gpus=0) as workers:
        before = search(InEvaluate(), executor=workers)
        assert "Training reads data/scale.txt" in caplog.text
        assert search(InEvaluate(), executor=workers) == before
        FOLDER.joinpath("scale.txt").write_text("2.0")
        with pytest.raises(StoreError, match=r"training reads data/scale\.txt, which changed"):
            search(InEvaluate(), executor=workers)


PROJECT = """
import os
from pathlib import Path
import numpy as np, optuna, torch, hpstage
from hpstage.training.identity.environment import describe
from hpstage.training.trainables import as_trainable

HERE = os.path.dirname(os.path.abspath(__file__))
DATA = Path(__file__).resolve().parent / "data"
FILES = [os.path.join(HERE, "data", f"{number}.txt") for number in range(300)]
OF_ALL = {"there": __file__, "scale": HERE + "/data/scale.txt"}

class Rows(torch.utils.data.Dataset):
    def __init__(self, root): self.root, self.x = root, torch.ones(8, 1)
    def __len__(self): return 8
    def __getitem__(self, index): return (self.x[index],)

class T(hpstage.torch.TorchTrainable):
    device = "cpu"
    root = HERE
    def __init__(self): self.folder = DATA
    def model(self, hp): return torch.nn.Linear(1, 1)
    def optimizer(self, m, hp): return torch.optim.SGD(m.parameters(), lr=.1)
    def dataset(self): return Rows(Path(HERE))
    def loss(self, m, b): return m(b[0]).mean() * float(open(os.path.join(HERE, "data", NAME + ".txt")).read())
    def evaluate(self, m): return {"w": 0.0 * len(FILES) * len(OF_ALL) * len(str(self.folder) + self.root)}

NAME = "scale"

if __name__ == "__main__":
    found = describe(as_trainable(T()))
    print(sorted(found.identity.items()), found.described["data"], found.described.get("files"))
    space = lambda trial: {"lr": 0.1, "batch_size": 4}
    try:
        hpstage.optimize(optuna.create_study(), T(), space, metric="w", steps=1, n_trials=1, store=os.environ["STORE"],
                         executor=hpstage.InlineExecutor())
        print("taken")
    except hpstage.errors.StoreError as error:
        print("refused:", error)
"""


@pytest.mark.ci
def test_two_checkouts_share_a_store_only_if_their_code_and_data_are_equal(tmp_path: Path) -> None:
    printed = {}
    for name, scale in (("one", "1"), ("another", "1"), ("third", "2")):
        data = tmp_path / name / "data"
        data.mkdir(parents=True)
        (data.parent / "proj.py").write_text(PROJECT)
        (data / "scale.txt").write_text(scale)
        done = subprocess.run(
            [sys.executable, data.parent / "proj.py"],
            env={**os.environ, "STORE": str(tmp_path / "store")},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        printed[name] = done.stdout
    assert "taken" in printed["one"]
    assert printed["one"] == printed["another"]
    assert "taken" not in printed["third"]


def test_a_checkpoint_that_hpstage_reads_during_training_is_not_an_input(tmp_path: Path) -> None:
    for name in ("state.safetensors", "data"):
        (tmp_path / name).write_bytes(b"content")
    inputs = Inputs(Tiny())
    with inputs:  # a step
        pass
    with FolderPlace(tmp_path).open("state.safetensors"):  # by another thread
        with inputs:
            pass
        assert inputs.news() == {}
    with open(tmp_path / "data"):
        assert [*inputs.news()] == [f"file {tmp_path / 'data'}"]


class Rewinding(Tiny):
    """Keeps the weights of some step in a file, and loads them again later."""

    def model(self, hp: Any) -> Any:
        self.steps = 0
        return super().model(hp)

    def loss(self, model: Any, batch: Any) -> Any:
        self.steps += 1
        time.sleep(0.01)
        if self.steps == 3:
            torch.save(model.state_dict(), "best.pt")
        if self.steps == 6:
            model.load_state_dict(torch.load("best.pt"))
        return super().loss(model, batch)


class Scratching(Rewinding):
    """Reads what the same step has written."""

    def loss(self, model: Any, batch: Any) -> Any:
        Path("scratch").write_text(f"{self.steps}")
        return super(Rewinding, self).loss(model, batch) * (1 + float(Path("scratch").read_text()))


class Measured(Rewinding):
    """To the system's files, looking at them for the first time is a modification."""

    def loss(self, model: Any, batch: Any) -> Any:
        self.steps += 1
        time.sleep(0.02)
        if self.steps >= 3:
            Path(f"/proc/self/task/{os.getpid()}/limits").read_text()
        return super(Rewinding, self).loss(model, batch)


class Answering(Rewinding):
    stateless = ("best.pt",)


@pytest.mark.parametrize(
    ("trainable", "is_named"), [(Rewinding, True), (Scratching, False), (Measured, False), (Answering, False)]
)
def test_a_file_that_a_step_writes_and_a_later_step_reads_is_logged(
    trainable: type, is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    search(trainable(), steps=8, n_trials=2)
    assert ("Training reads best.pt, which earlier steps have written" in caplog.text) is is_named
    assert ("which earlier steps have written" in caplog.text) is is_named
