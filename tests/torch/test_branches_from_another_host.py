"""Branches made at once by processes with folders of their own, over a Redis server and a folder for checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

import hpstage
from hpstage import schedule as s
from hpstage.checkpoints.state_tree import digest
from tests.redis_server import RedisServer
from tests.torch.test_branches import HP, STEPS, Line, train

HOST = """
import sys

import hpstage
from hpstage.errors import UsageError
from tests.torch.test_branches import Line

if __name__ == "__main__":
    store, checkpoints, study, at, *rates = sys.argv[1:]
    trunk = hpstage.open(store, checkpoints=checkpoints).trial("runs/0")
    print("ready", flush=True)
    sys.stdin.readline()
    here = hpstage.InlineExecutor()
    try:
        trunk.branch(int(at), lr=[float(rate) for rate in rates], study=study, trainable=Line(), executor=here)
    except UsageError as error:
        sys.exit(str(error))
"""


@pytest.mark.redis
@pytest.mark.ci
def test_two_hosts_that_branch_from_one_trial_concurrently_train_common_steps_once(
    shared_redis: RedisServer, tmp_path: Path
) -> None:
    """One the same branch as the other, and one with another rate; each as trained in a store of its own."""
    store, checkpoints = f"{shared_redis.url}?prefix={uuid.uuid4().hex}", str(tmp_path / "checkpoints")
    places = {"store": store, "checkpoints": checkpoints, "executor": hpstage.InlineExecutor()}
    hpstage.train(Line(), HP, steps=STEPS, metric="loss", checkpoint_every=5, **places)  # type: ignore[call-overload]
    hosts = []
    for study, rates in (("runs", ["0.03"]), ("mine", ["0.03", "0.01"])):
        (folder := tmp_path / study).mkdir()
        words = [sys.executable, "-c", HOST, store, checkpoints, study, "5", *rates]
        environment = {**os.environ, "PYTHONPATH": str(Path(hpstage.__file__).parent.parent)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        hosts.append(subprocess.Popen(words, cwd=folder, env=environment, text=True, **pipes))  # type: ignore[call-overload]
    try:
        for host in hosts:
            assert host.stdout.readline() == "ready\n"
        for host in hosts:
            host.stdin.write("\n")
            host.stdin.flush()
        assert [host.wait(300) for host in hosts] == [0, 0]
    finally:
        for host in hosts:
            host.kill()
            host.wait()
            host.stdin.close()
            host.stdout.close()
    opened = hpstage.open(store, checkpoints=checkpoints)
    assert {*opened.trials} == {"runs/0", "runs/1", "mine/0", "mine/1"}
    assert opened.plan.totals.steps_trained == STEPS + 2 * (STEPS - 5)
    found = {name: opened.trial(name) for name in opened.trials}
    for rate, names in ((0.03, ["runs/1", "mine/0"]), (0.01, ["mine/1"])):
        alone = train(tmp_path / f"{rate}", {**HP, "lr": s.cosine(0.1, T_max=STEPS).until(5).then(rate)})
        for name in names:
            assert found[name].metrics[STEPS] == alone.metrics[STEPS]
            assert digest(found[name].state(STEPS)) == digest(alone.state(STEPS))
