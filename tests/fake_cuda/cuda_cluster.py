"""Searches on a cluster of GPUs as dask-cuda starts it."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from typing import Any

import optuna
from distributed import Client, Nanny, Scheduler, SpecCluster

import hpstage
from hpstage import schedule as s
from hpstage.cluster import DaskExecutor
from hpstage.errors import ClusterError
from hpstage.store import MemoryJournal
from tests.torch.trainables import Small, samples


class OnGPU(Small):
    device = None  # the default

    def evaluate(self, model: Any) -> dict[str, float]:
        return {"mean": model(samples()[0]).mean().item()}


class OnBoth(OnGPU):
    devices_per_stage = 2


def cluster_of(kind: str, names: list[str]) -> Any:
    """Two workers, each of which sees all devices, its own first."""
    if kind == "dask_cuda":
        from dask_cuda import LocalCUDACluster

        return LocalCUDACluster(names, dashboard_address="127.0.0.1:0")
    workers = {
        name: {"cls": Nanny, "options": {"nthreads": 1, "env": {"CUDA_VISIBLE_DEVICES": ",".join(order)}}}
        for name, order in zip(names, (names, names[::-1]), strict=True)
    }
    return SpecCluster(workers, {"cls": Scheduler, "options": {"dashboard_address": "127.0.0.1:0"}})


def space(trial: optuna.Trial) -> dict[str, object]:
    return {
        "lr": s.piecewise({0: 0.1, 2: trial.suggest_categorical("late", [0.1, 0.05, 0.02])}),
        "momentum": 0.9,
        "batch_size": 4,
    }


def values(executor: object) -> dict[float, float | None]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"late": [0.1, 0.05, 0.02]}))
    hpstage.optimize(
        study, OnGPU(), space, metric="mean", steps=4, n_trials=3, executor=executor, store=MemoryJournal()
    )  # type: ignore[arg-type]
    return {trial.params["late"]: trial.value for trial in study.trials}


def main() -> None:
    """Write what comes of them, as JSON.

    The arguments of the command line are the kind of cluster, ``dask_cuda`` or ``rebuilt`` for workers by the
    specification that it documents, and the names of the two devices.
    """
    kind, names = sys.argv[1:]
    found: dict[str, object] = {}
    with cluster_of(kind, names.split(",")) as cluster, Client(cluster, set_as_default=False) as client:
        client.wait_for_workers(2, timeout=120)
        found["seen"] = sorted(client.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"]).values())
        with closing(DaskExecutor(cluster, gpus=2)) as executor:
            executor.open(OnGPU(), None)
            found["used"] = sorted(one.devices for one in executor._members._present.values())
        found["equal"] = values(cluster) == values(hpstage.InlineExecutor())
        try:
            with closing(DaskExecutor(cluster)) as executor:
                executor.open(OnBoth(), None)
        except ClusterError as error:
            found["refused"] = str(error)
    sys.stdout.write(json.dumps(found) + "\n")
