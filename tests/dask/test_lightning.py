"""A LightningModule on Dask workers: the same bits as in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed import Client

import hpstage
from hpstage.cluster import DaskExecutor

pytest.importorskip("lightning")

from tests.torch.test_lightning import assert_equal, search

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning 2.6 under torch 2.13
]


@pytest.mark.ci  # each training process imports Lightning itself
def test_dask_workers_train_a_lightning_module_to_the_bits_of_the_inline_executor(
    client: Client, tmp_path: Path
) -> None:
    there = search(tmp_path / "there", executor=DaskExecutor(client))
    here = search(tmp_path / "here", executor=hpstage.InlineExecutor())
    assert [trial.value for trial in there.study.trials] == [trial.value for trial in here.study.trials]
    for trial in here.study.trials:
        assert_equal(there.load(trial).model.state_dict(), here.load(trial).model.state_dict(), trial.number)
