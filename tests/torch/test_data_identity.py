"""What of the data decides the workload: all that can be digested, wherever it is held; and what is said about it."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import hpstage
from hpstage.errors import UsageError
from hpstage.plan.keys import workload_key
from hpstage.store import MemoryJournal
from hpstage.training.identity import values
from hpstage.training.identity.environment import describe
from hpstage.training.trainables import as_trainable
from tests.torch.trainables import Small, ordinary_loop

pytestmark = pytest.mark.sampled(5)

optuna.logging.set_verbosity(optuna.logging.ERROR)
ROWS = 1797


def key(trainable: object) -> str:
    found = describe(as_trainable(trainable))
    return workload_key({**found.identity, **found.described})


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Rows(Dataset[Any]):
    """A user's own; ``lock`` has no digest."""

    def __init__(self, x: Any) -> None:
        self.x = x
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.x[index]) * 2 if isinstance(self.x, np.ndarray) else torch.as_tensor(self.x[index])


class Stored(Dataset[Any]):
    """A file for each sample."""

    def __init__(self, folder: Path) -> None:
        self.samples = [(str(folder / f"{number}.npy"), number % 2) for number in range(80)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return np.load(self.samples[index][0]), self.samples[index][1]


def stored(x: torch.Tensor, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for number in range(80):
        np.save(folder / f"{number}.npy", x[number].numpy())
    np.save(folder / "all.npy", x.numpy())
    return folder


MAKE: dict[str, Any] = {
    "tensors": lambda x, folder: TensorDataset(x),
    "a subset": lambda x, folder: Subset(TensorDataset(x), range(0, ROWS, 2)),
    "two in one": lambda x, folder: ConcatDataset([TensorDataset(x[:900]), TensorDataset(x[900:])]),
    "an own one of a tensor": lambda x, folder: Rows(x),
    "an own one of an array": lambda x, folder: Rows(x.numpy()),
    "an own one of lists": lambda x, folder: Rows(x[:100].tolist()),
    "an own one of a mapped file": lambda x, folder: Rows(np.load(stored(x, folder) / "all.npy", mmap_mode="r")),
    "files": lambda x, folder: Stored(stored(x, folder)),
    "a list": lambda x, folder: list(x),
}


def data_text(dataset: Any) -> str:
    class Given(Small):
        def dataset(self) -> Any:
            return dataset

    return str(as_trainable(Given()).describe_data())  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_every_row_of_the_training_set_is_in_the_data_digest_for_each_kind_of_data_set(
    make: Any, tmp_path: Path
) -> None:
    x = noise(0, ROWS, 16)
    spoilt = x.clone()
    spoilt[1:80] = noise(1, 79, 16)  # what 16 evenly spaced samples do not show
    before = data_text(make(x, tmp_path / "a"))
    assert data_text(make(spoilt, tmp_path / "b")) != before
    assert data_text(make(x.clone(), tmp_path / "elsewhere")) == before
    labelled = x.clone()
    labelled[ROWS // 2, 3] += 1e-3
    if make is not MAKE["files"] and make is not MAKE["an own one of lists"]:
        assert data_text(make(labelled, tmp_path / "c")) != before


TEST = torch.zeros(0)


class OfGlobal(Small):
    def evaluate(self, model: Any) -> dict[str, float]:
        return {"sum": float(TEST.sum())}


class OfClass(OfGlobal):
    test = torch.zeros(0)


class OfAttribute(Small):
    def __init__(self, test: torch.Tensor) -> None:
        self.test = test


class ThatDatasetSets(Small):
    def __init__(self, path: str) -> None:
        self.folder, self.name = os.path.split(path)

    def dataset(self) -> Any:
        self.test = np.load(os.path.join(self.folder, self.name))
        return super().dataset()


class ThatDatasetSetsInAGlobal(OfGlobal):
    def __init__(self, path: str) -> None:
        self.folder, self.name = os.path.split(path)

    def dataset(self) -> Any:
        global TEST
        TEST = torch.from_numpy(np.load(os.path.join(self.folder, self.name)))
        return super().dataset()


class ReadByEvaluate(Small):
    def __init__(self, path: str) -> None:
        self.path = {"test": Path(path)}

    def evaluate(self, model: Any) -> dict[str, float]:
        return {"sum": float(np.load(self.path["test"]).sum())}


@pytest.mark.parametrize(
    "way", [OfGlobal, OfClass, OfAttribute, ThatDatasetSets, ThatDatasetSetsInAGlobal, ReadByEvaluate]
)
def test_a_changed_test_set_changes_the_key_wherever_the_trainable_holds_it(
    way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "TEST", TEST)

    def made(test: torch.Tensor) -> Any:
        np.save(tmp_path / "test.npy", test.numpy())
        if way is OfGlobal:
            monkeypatch.setitem(globals(), "TEST", test)
            return way()
        if way is OfClass:
            monkeypatch.setattr(way, "test", test)
            return way()
        return way(test if way is OfAttribute else str(tmp_path / "test.npy"))

    before = key(made(noise(0, 360, 64)))
    assert key(made(noise(0, 360, 64))) == before
    assert key(made(torch.zeros(360, 64))) != before


def closing_over(test: Any) -> Any:
    def train(run: Any) -> Any:
        return test

    return train


@pytest.mark.ci
def test_all_bytes_of_data_in_a_closure_are_in_the_key() -> None:
    zeros = Rows(torch.zeros(1000, 8))
    last = Rows(torch.zeros(1000, 8))
    last.x[-1, -1] = 1
    assert key(closing_over({"test": zeros})) == key(closing_over({"test": Rows(torch.zeros(1000, 8))}))
    assert key(closing_over({"test": zeros})) != key(closing_over({"test": last}))


def test_small_files_are_digested_in_full_and_large_files_by_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpstage.training.identity.files.WHOLE", 10_000)
    monkeypatch.setattr("hpstage.training.identity.files._BLOCK", 1_000)
    for size in (5_000, 200_000):
        path = tmp_path / f"{size}.bin"
        path.write_bytes(bytes(size))
        before = key(ReadByEvaluate(str(path)))
        content = bytearray(size)
        content[size // 2 if size == 5_000 else -1] = 1
        path.write_bytes(content)
        assert key(ReadByEvaluate(str(path))) != before


def test_a_large_memory_mapped_array_is_digested_by_blocks_with_a_remark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "_MAPPED", 10_000)
    monkeypatch.setattr(values, "_BLOCK", 64)
    np.save(tmp_path / "x.npy", np.zeros((5_000, 4)))
    before = data_text(Rows(np.load(tmp_path / "x.npy", mmap_mode="r")))
    changed = np.zeros((5_000, 4))
    changed[-1] = 1
    np.save(tmp_path / "x.npy", changed)
    rows = Rows(np.load(tmp_path / "x.npy", mmap_mode="r"))
    assert data_text(rows) != before

    class Given(Small):
        def dataset(self) -> Any:
            return rows

    assert "digested in parts" in describe(as_trainable(Given())).remarks[0]


class Reading(Small):
    """Its data set hangs on a hyperparameter."""

    def dataset(self) -> Any:
        count = self.hp.get("rows", 30)
        return TensorDataset(torch.zeros(count, 1, 8, 8), torch.zeros(count))


@pytest.mark.parametrize("data_version", [None, "1"])
def test_a_data_set_that_depends_on_a_hyperparameter_is_refused_by_name(data_version: str | None) -> None:
    reading = Reading()
    reading.data_version = data_version
    with pytest.raises(
        (UsageError, hpstage.errors.TrainingError), match=r"Reading\.dataset\(\) reads self\.hp\['rows'\]"
    ):
        hpstage.optimize(
            optuna.create_study(),
            reading,
            lambda trial: {"rows": trial.suggest_int("rows", 10, 30), "lr": 0.1, "momentum": 0.9, "batch_size": 4},
            metric="accuracy",
            steps=2,
            n_trials=2,
            executor=hpstage.InlineExecutor(),
            store=MemoryJournal(),
            catch=(),
        )


class Computed(Dataset[Any]):
    def __init__(self, folder: str = "nowhere") -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        return torch.full((1, 8, 8), float(index)), index % 3


class OfComputed(Small):
    def dataset(self) -> Any:
        return Computed()


def searched(trainable: object, caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    with caplog.at_level(logging.INFO, logger="hpstage"):
        hpstage.optimize(
            optuna.create_study(),
            trainable,
            lambda trial: {"lr": 0.1, "momentum": 0.9, "batch_size": 4},
            metric="loss",
            steps=1,
            n_trials=1,
            executor=hpstage.InlineExecutor(),
            store=MemoryJournal(),
        )
    return [(record.levelno, record.getMessage()) for record in caplog.records if "data" in record.getMessage()]


def test_one_log_line_names_the_data_that_are_in_the_key(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    np.save(tmp_path / "test.npy", np.zeros(250_000))
    [(level, text)] = searched(ThatDatasetSets(str(tmp_path / "test.npy")), caplog)
    assert level == logging.INFO
    assert "30 samples, 7.9 kB of them digested" in text
    assert "set by dataset(): self.test" in text


@pytest.mark.ci
def test_a_data_set_that_can_only_be_sampled_is_warned_about_once_with_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = searched(OfComputed(), caplog)
    [warning] = [text for level, text in found if level == logging.WARNING]
    assert "64 of 1,000 samples" in warning
    assert "data_version" in warning
    caplog.clear()
    stated = OfComputed()
    stated.data_version = "1"
    assert searched(stated, caplog) == []
    assert all(level == logging.INFO for level, _ in searched(ordinary_loop, caplog))


def test_data_have_the_same_digest_in_every_process(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.torch.test_data_identity import MAKE, ROWS, data_text, noise\n"
        "x = noise(0, ROWS, 16)\n"
        "for name, make in MAKE.items(): print(name, data_text(make(x, Path(sys.argv[1]))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "there")],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    x = noise(0, ROWS, 16)
    assert done.stdout == "".join(f"{name} {data_text(make(x, tmp_path / 'here'))}\n" for name, make in MAKE.items())


WEIGHTS = "weights.npy"


class LoadsByLiteral(Small):
    def model(self, hp: Any) -> Any:
        self.begin = np.load("weights.npy")
        return super().model(hp)


class LoadsByGlobal(Small):
    def model(self, hp: Any) -> Any:
        self.begin = np.load(os.path.join(os.curdir, WEIGHTS))
        return super().model(hp)


class ReadsText(Small):
    def model(self, hp: Any) -> Any:
        self.begin = Path("weights.npy").read_bytes()
        return super().model(hp)


class OpensInAFunction(Small):
    def model(self, hp: Any) -> Any:
        self.begin = read_weights()
        return super().model(hp)


def read_weights() -> bytes:
    with open("weights.npy", "rb") as file:
        read = file.read()
    with open("seen.txt", "w") as file:
        file.write("seen")
    return read


def read_weights_of_the_step(run: Any) -> Any:
    yield np.load("weights.npy")
    np.save("out.npy", np.zeros(3))


@pytest.mark.ci
@pytest.mark.parametrize("way", [LoadsByLiteral, LoadsByGlobal, ReadsText, OpensInAFunction, "function"])
def test_the_content_of_a_file_named_in_the_code_is_in_the_key(
    way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def made() -> str:
        return key(read_weights_of_the_step if way == "function" else way())

    np.save("weights.npy", np.zeros(3))
    before = made()
    assert made() == before
    for written in ("seen.txt", "out.npy"):  # what training writes is not an input
        Path(written).write_text("by another run")
    assert made() == before
    np.save("weights.npy", np.ones(3))
    assert made() != before


def reading(run: hpstage.Run, text: str, *, more: tuple[str, ...] = ()) -> None:
    ordinary_loop(run)


def test_the_content_of_files_named_by_arguments_of_a_partial_is_in_the_key(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    for train in (functools.partial(reading, text=str(path)), functools.partial(reading, text="", more=(str(path),))):
        path.write_text("one")
        before = key(train)
        path.write_text("two")
        assert key(train) != before
        path.write_text("one")
        assert key(train) == before
