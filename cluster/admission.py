"""Which workers may train together: they hold the trainable, are processes of their own, and are alike."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Collection

from hpstage.cluster.messages import Description
from hpstage.errors import ClusterError, UsageError
from hpstage.executor import Environment


def environment_of(descriptions: Collection[Description], gpus: int | None) -> Environment:
    """The environment that all workers share.

    Raises:
        UsageError: the trainable cannot be unpacked or set up on a worker.
        ClusterError: fewer than ``gpus`` workers have a CUDA device, several workers live in one process, or
            environments differ (the text names the items).
    """
    for description in descriptions:
        if description.problem is not None:
            raise UsageError(explain(description))
    places = {(socket.gethostname(), os.getpid())}
    for description in descriptions:
        if (description.host, description.pid) in places:
            raise ClusterError(
                "workers share a process with each other or with this one; random numbers and devices belong to a "
                "process, so start each worker as one: LocalCluster(processes=True), or hpstage.cluster.local_cluster()"
            )
        places.add((description.host, description.pid))
    if gpus is not None:
        able = sum(description.cuda for description in descriptions)
        if able < gpus:
            raise ClusterError(
                f"{gpus} GPUs were asked for, but {able} of {len(descriptions)} workers see a CUDA device; start one "
                f"worker per GPU with CUDA_VISIBLE_DEVICES set and a torch that was built for CUDA, or pass gpus={able}"
            )
    differing = _differences(descriptions)
    if differing:
        raise ClusterError(
            f"workers differ in {differing}; they would not train to the same bits. Start workers of one kind, with "
            f"the same packages"
        )
    return Environment(next(iter(descriptions)).described or {})


def explain(description: Description) -> str:
    """Why a worker cannot train, with a remedy."""
    problem = description.problem
    assert problem is not None
    if problem.kind == "import":
        return (
            f"worker {description.worker} cannot import what the trainable needs ({problem.summary}); install it "
            f"there, or put the module on the workers' PYTHONPATH (client.upload_file sends a single file)"
            f"\n\n{problem.traceback}"
        )
    return f"the trainable cannot be set up on worker {description.worker}: {problem.summary}\n\n{problem.traceback}"


def refusal(description: Description, environment: Environment) -> str | None:
    """Why a worker that came later may not train with the others; ``None`` if it may."""
    if description.problem is not None:
        return explain(description)
    differing = _differences([Description("the others", "", 0, described=environment.described), description])
    return f"it differs in {differing}" if differing else None


def _differences(descriptions: Collection[Description]) -> str:
    names = sorted({name for description in descriptions for name in description.described or {}})
    texts = []
    for name in names:
        workers = defaultdict(list)
        for description in descriptions:
            workers[(description.described or {}).get(name, "absent")].append(description.worker)
        if len(workers) > 1:
            texts.append(f"{name} (" + "; ".join(f"{value!r} on {who[0]}" for value, who in workers.items()) + ")")
    return ", ".join(texts)
