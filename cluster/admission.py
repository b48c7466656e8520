"""Admission of workers: each must hold the trainable, be a separate process, and match the others."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Collection, Mapping

from msgspec.structs import replace

from hpstage.cluster.messages import Description
from hpstage.errors import ClusterError, UsageError
from hpstage.executor import Environment
from hpstage.plan.devices import Devices
from hpstage.training.identity.code_identity import differences, drifts

_NAMED = 5
"""Maximum number of differing functions, modules and packages that are named."""


def environment_of(
    descriptions: Collection[Description], gpus: int | None, loaded: Mapping[str, str] | None = None
) -> Environment:
    """Return the environment that all workers share. ``loaded``: the trainable's code as loaded by the driver.

    Raises:
        UsageError: the trainable cannot be unpacked or set up on a worker, or a worker has loaded other code.
        ClusterError: fewer than ``gpus`` workers have a CUDA device, several workers share a process or a device, or
            environments differ (the text names the items).
    """
    for description in descriptions:
        if description.problem is not None:
            raise UsageError(explain(description))
    places = {(socket.gethostname(), os.getpid())}
    for description in descriptions:
        if (description.host, description.pid) in places:
            raise ClusterError(
                "workers share a process with each other or with this one, but need random numbers and a device of "
                "their own. Start each worker as a process: LocalCluster(processes=True), or "
                "hpstage.cluster.local_cluster()"
            )
        places.add((description.host, description.pid))
    if gpus is not None:
        able = sum(description.cuda for description in descriptions)
        if able < gpus:
            raise ClusterError(
                f"{gpus} GPUs were requested, but {able} of {len(descriptions)} workers see a CUDA device; start one "
                f"worker per GPU with CUDA_VISIBLE_DEVICES set and a torch that was built for CUDA, or pass gpus={able}"
            )
    if shared := _shared_device(descriptions):
        raise ClusterError(shared)
    for description in descriptions:
        other = _other_code(description, loaded)
        if other is not None:
            raise UsageError(other)
    differing = _differences(descriptions)
    if differing:
        raise ClusterError(
            f"workers differ in {differing}, so they would compute different bits. {_computed(descriptions)}Start "
            f"identical workers, with the same packages, files and data. If only their devices differ, pass "
            f"environment='NAME' to train on those whose device name contains NAME, or environment='any' to train on "
            f"all, although the last bits of results then depend on the device"
        )
    first = next(iter(descriptions))
    environment = _environment(first)
    drifted = drifts(loaded or {}, environment.loaded)
    if drifted:
        warning = (
            f"your modules compute other values of {', '.join(drifted[:_NAMED])} on {first.worker} than in this "
            f"process. Training uses the workers' values. If you have edited such a file, restart the process that "
            f"imported it before the edit"
        )
        environment = replace(environment, warnings=[*environment.warnings, warning])
    return environment


def seen(description: Description, devices: Devices) -> Description:
    """Return the description with its environment as seen by a search on these devices."""
    environment = description.environment
    if environment is None:
        return description
    return replace(description, environment=replace(environment, described=devices.seen(environment.described)))


def other_device(description: Description, devices: Devices) -> str | None:
    """Return why a search on these devices does not use the worker's device; ``None`` if it does, or if the worker has
    another problem."""
    return None if description.environment is None else devices.excludes(description.environment.described)


def explain(description: Description) -> str:
    """Explain why a worker cannot train, with a remedy."""
    problem = description.problem
    assert problem is not None
    if problem.kind == "import":
        return (
            f"worker {description.worker} cannot import a module that the trainable needs ({problem.summary}); install "
            f"it there, or put it on the workers' PYTHONPATH (client.upload_file sends a single file)"
            f"\n\n{problem.traceback}"
        )
    if problem.kind == "killed":
        return (
            f"the trainable cannot be set up on worker {description.worker}: {problem.summary}; check whether its host "
            f"has enough memory, and run the same command again"
        )
    text = f"the trainable cannot be set up on worker {description.worker}: {problem.summary}\n\n{problem.traceback}"
    return text.rstrip()


def refusal(
    description: Description,
    environment: Environment,
    loaded: Mapping[str, str] | None = None,
    others: Collection[Description] = (),
) -> str | None:
    """Return why a worker that joined later may not train with the ``others``; ``None`` if it may."""
    if description.problem is not None:
        return explain(description)
    other = _other_code(description, loaded)
    if other is not None:
        return other
    if shared := _shared_device([*(other for other in others if other.worker != description.worker), description]):
        return shared
    differing = _differences([Description("the others", "", 0, environment=environment), description])
    return f"it differs in {differing}" if differing else None


def _shared_device(descriptions: Collection[Description]) -> str | None:
    """Return a text about a device on which two workers would train, with a remedy; ``None`` if there is none."""
    users: dict[tuple[str, str], str] = {}
    for description in descriptions:
        for device in description.devices:
            other = users.setdefault((description.host, device), description.worker)
            if other != description.worker:
                return (
                    f"workers {other} and {description.worker} would both train on GPU {device} of {description.host}. "
                    f"Start one worker per GPU (dask_cuda.LocalCUDACluster, or hpstage worker), one per group of GPUs "
                    f"for a trainable with devices_per_stage (hpstage worker --gpus-per-worker N), or let them share "
                    f"it (hpstage worker --workers-per-gpu N)"
                )
    return None


def _other_code(description: Description, loaded: Mapping[str, str] | None) -> str | None:
    """Return a text about code and packages in which a worker differs from this process, with a remedy; ``None`` if
    there is no difference."""
    if loaded is None:
        return None
    differing = differences(loaded, _environment(description).loaded)
    if not differing:
        return None
    more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
    return (
        f"worker {description.worker} has other code than this process: {', '.join(differing[:_NAMED])}{more}. Install "
        f"the same versions of packages, and give the workers the current files (client.upload_file, or their "
        f"PYTHONPATH). If files were edited after they were imported, restart the workers (client.restart()) or this "
        f"process (a notebook's kernel)"
    )


def _computed(descriptions: Collection[Description]) -> str:
    """Return a text about values that importing computes differently on each worker, with a remedy; ``""`` if none."""
    first, *others = (_environment(description).loaded for description in descriptions)
    names = sorted({name for other in others for name in drifts(first, other)})
    if not names:
        return ""
    return (
        f"Importing your modules computes another value of {', '.join(names[:_NAMED])} in each process (a time, or a "
        f"random number). Compute it when training begins, or name it in `stateless` if training does not depend on "
        f"it. "
    )


def _environment(description: Description) -> Environment:
    return description.environment or Environment({})


def _differences(descriptions: Collection[Description]) -> str:
    described_by = [
        (description.worker, {**_environment(description).identity, **_environment(description).described})
        for description in descriptions
    ]
    texts = []
    for name in sorted({name for _, described in described_by for name in described}):
        workers = defaultdict(list)
        for worker, described in described_by:
            workers[described.get(name, "absent")].append(worker)
        if len(workers) > 1:
            texts.append(f"{name} (" + "; ".join(f"{value!r} on {who[0]}" for value, who in workers.items()) + ")")
    return ", ".join(texts)
