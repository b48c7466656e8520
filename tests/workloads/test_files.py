"""Files that are missing, cut off or damaged are named, with the remedy, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import optuna
import pytest
import torch

import hpstage
from hpstage.errors import UsageError
from hpstage.workloads import cifar, gpt, recommender
from tests.workloads.cases import CASES, STEPS, write_files


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write_files(tmp_path)
    return tmp_path


def test_cifar_images_and_labels_are_read_from_the_binary_records(files: Path) -> None:
    images, labels = cifar.read(str(files), cifar.TRAINING)
    assert (images.shape, images.dtype, labels.dtype) == ((10, 3, 32, 32), torch.uint8, torch.int64)
    second = (files / "data_batch_2.bin").read_bytes()
    assert labels[2] == second[0]
    assert images[2, 2, 1, 5] == second[1 + 2 * 1024 + 32 + 5]  # planes of red, green, blue; row by row


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "there is no file"),
        (lambda path: path.write_bytes(b""), "has a wrong size, 0 bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "has a wrong size, 6,046 bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[: cifar.RECORD]), "has a wrong size, 3,073 bytes"),
        (lambda path: path.write_bytes(b"\xff" * 2 * cifar.RECORD), "labels above 9"),
    ],
)
def test_a_damaged_cifar_file_is_named_in_the_error(
    files: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(files / "data_batch_3.bin")
    with pytest.raises(UsageError, match=rf"data_batch_3\.bin.*{message}|{message}.*data_batch_3\.bin") as raised:
        cifar.read(str(files), cifar.TRAINING)
    assert "cifar-10-binary.tar.gz" in str(raised.value) and "CIFAR10" in str(raised.value)


def test_the_gpt_text_is_memory_mapped(files: Path) -> None:
    training, validation = gpt.read(str(files / "text.txt"), block=16)
    assert isinstance(training, np.memmap) and isinstance(validation, np.memmap)
    assert (len(training), len(validation)) == (810, 90)
    inputs, targets = gpt.windows(training, [0, 4], 3, "cpu")
    assert bytes(inputs[1].tolist()) + bytes(targets[1, -1:].tolist()) == b"quic"


def test_a_missing_or_too_short_gpt_text_is_named_in_the_error(files: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no file .*nothing\.txt.*GPT_TEXT"):
        gpt.read(str(files / "nothing.txt"), block=16)
    with pytest.raises(UsageError, match=r"text\.txt has 900 bytes; a block of 256 bytes needs 2,570"):
        gpt.read(str(files / "text.txt"), block=256)


def test_a_malformed_empty_or_missing_ratings_file_is_named_in_the_error(files: Path) -> None:
    path = files / "u.data"
    path.write_text(path.read_text() + "7\t3\t4")  # cut off
    with pytest.raises(
        UsageError, match=r"line 61 .*u\.data is '7\\t3\\t4', which is not a rating.*ml-100k\.zip.*MOVIELENS"
    ):
        recommender.read(str(path))
    path.write_text("")
    with pytest.raises(UsageError, match="is empty"):
        recommender.read(str(path))
    path.unlink()
    with pytest.raises(UsageError, match=r"there is no file .*u\.data"):
        recommender.read(str(path))


@pytest.mark.parametrize("name", ["resnet", "gpt", "recommender"])
def test_a_search_without_its_data_files_fails_before_training(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    study = optuna.create_study(direction=case.direction)
    with pytest.raises(UsageError, match="there is no file"):
        hpstage.optimize(
            study,
            case.make(tmp_path),
            case.space,
            metric=case.metric,
            steps=STEPS,
            n_trials=2,
            executor=hpstage.InlineExecutor(),
            store=tmp_path / "store",
        )
    assert not any(trial.values for trial in study.trials)
