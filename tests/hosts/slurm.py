"""Slurm on this host: real daemons in a folder, with ports, a key and a configuration of their own. Needs root."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.dask.processes import until

_DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue")
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=10
OverTimeLimit=0
SchedulerParameters=sched_interval=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory=2000 State=UNKNOWN
PartitionName=debug Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


def missing() -> str:
    """Why there is no Slurm here; empty if it can be started."""
    if os.getuid() != 0:
        return "its daemons need root"
    absent = [name for name in _DAEMONS if shutil.which(name) is None]
    return f"{absent[0]} is not installed (Debian: slurmctld slurmd slurm-client munge)" if absent else ""


@contextmanager
def slurm(folder: Path) -> Iterator[Path]:
    """Start the daemons; yield the file that SLURM_CONF names."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    key, file = folder / "munge.key", folder / "slurm.conf"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], other.getsockname()[1]
    host = socket.gethostname().partition(".")[0]
    file.write_text(_CONFIGURATION.format(host=host, ports=ports, folder=folder, cores=os.cpu_count()))
    of_munge = [f"--{name}={folder}/munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    of_munge[0] = f"--socket={folder}/munge.sock"
    commands = (
        ["munged", "--force", "--foreground", f"--key-file={key}", *of_munge],
        ["slurmctld", "-D", "-f", str(file)],
        ["slurmd", "-D", "-f", str(file)],
    )
    daemons: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "SLURM_CONF": str(file)}
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("wb") as output:
                daemons.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment))
            if command[0] == "munged":
                until(lambda: (folder / "munge.sock").exists(), "munged listens")
        until(lambda: b"idle" in subprocess.run(["sinfo"], capture_output=True, env=environment).stdout, "a node is up")
        yield file
    finally:
        subprocess.run(["scancel", "--user=root"], capture_output=True, env=environment)
        time.sleep(1)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)
