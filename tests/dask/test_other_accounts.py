"""Another account of the host gets nothing of a search that is running: two real user ids, so as root only."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.dask.commands import children, until

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or os.geteuid() != 0, reason="only root can act as another account"
    ),
]

VICTIM = """
import sys
from collections.abc import Iterator
from pathlib import Path
import optuna
import hpstage
from hpstage.testing.toys import Counter, Gate

class Gated(Counter):
    stateless = ("shut-from", "reached")  # the gate's files

if __name__ == "__main__":
    hpstage.optimize(
        optuna.create_study(), Gated(Gate(Path("gate"))), lambda trial: {"x": trial.suggest_int("x", 1, 9)},
        metric="total", steps=4, n_trials=2, executor=hpstage.cluster.DaskExecutor(n_workers=2, gpus=0), store="store",
    )
"""

ATTACKER = '''
"""Tries to reach a search as another account; prints what it has reached."""
import asyncio, json, os, socket, sys
import cloudpickle, distributed
from collections.abc import Iterator
from pathlib import Path

ports, pids, sockets, folder = json.loads(sys.argv[1])
with distributed.LocalCluster(1, processes=False, dashboard_address=None, protocol="tcp://") as warm:
    with distributed.Client(warm.scheduler_address) as client:
        client.run_on_scheduler(os.getpid)  # all that is needed is imported while this account can read it
os.setgroups([]), os.setgid(65534), os.setuid(65534)
reached, failed = [], []

def injected():
    import os
    return os.getuid()

async def run_by(port, handler):
    async with asyncio.timeout(5), distributed.rpc(f"tcp://127.0.0.1:{port}") as peer:
        words = {"args": cloudpickle.dumps(()), "kwargs": cloudpickle.dumps({})}
        return await getattr(peer, handler)(function=cloudpickle.dumps(injected), **words)

for port in ports:
    for handler in ("run_function", "run"):  # of a scheduler; of a worker and of a nanny
        try:
            found = asyncio.run(run_by(port, handler))
            if found["status"] == "OK":
                reached.append(f"port {port}: runs code as {found['result']}")
        except Exception as error:  # whatever a peer of another kind answers
            failed.append(repr(error))
for name in sockets:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as peer:
            try:
                peer.connect(name)
                reached.append(f"socket {name!r}")
            except OSError:
                pass
for pid in pids:
    for what in ("fd", "map_files"):
        try:
            reached += [f"{what} of {pid}: {os.listdir(f'/proc/{pid}/{what}')}"]
        except OSError:
            pass
    for number in range(64):
        try:
            os.close(os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY))
            reached.append(f"file {number} of {pid}")
        except OSError:
            pass
    try:
        os.kill(pid, 0)
        reached.append(f"a signal to {pid}")
    except OSError:
        pass
for place in (Path(folder), Path("/dev/shm"), Path("/tmp")):
    for parent, folders, files in os.walk(place):
        for name in (*folders, *files):
            path = os.path.join(parent, name)
            if place == Path(folder) or "hpstage-" in name or "dask" in name or "torch_" in name:
                try:
                    mine = os.stat(path).st_uid == 65534
                except OSError:
                    continue
                if not mine and os.access(path, os.W_OK) and not os.path.islink(path):
                    reached.append(f"writing {path}")
print(json.dumps(reached), flush=True)
print(failed, file=sys.stderr)
os._exit(0)  # Dask waits for peers that do not answer
'''


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A search as anybody starts it, while its workers stand in a step."""
    (tmp_path / "gate").mkdir()
    (tmp_path / "gate" / "shut-from").write_text("1")
    (tmp_path / "search.py").write_text(VICTIM)
    with subprocess.Popen([sys.executable, "search.py"], cwd=tmp_path) as process:
        until(lambda: (tmp_path / "gate" / "reached").exists() or process.poll() is not None, "the search trains")
        assert process.poll() is None
        yield process
        (tmp_path / "gate" / "shut-from").unlink()
        assert process.wait(150) == 0


def family(pid: int) -> list[int]:
    """A process and all below it."""
    return [pid, *(below for child in children(pid) for below in family(child))]


def listening(pids: list[int]) -> list[int]:
    """The ports at which these processes listen."""
    inodes = {link for pid in pids for link in links(pid)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                found.add(int(words[1].rpartition(":")[2], 16))
    return sorted(found)


def named_sockets(pids: list[int]) -> list[str]:
    """The Unix sockets of these processes that have names."""
    inodes = {link for pid in pids for link in links(pid)}
    rows = [line.split() for line in Path(f"/proc/{pids[0]}/net/unix").read_text().splitlines()[1:]]
    return [row[7].replace("@", "\0", 1) for row in rows if len(row) > 7 and f"socket:[{row[6]}]" in inodes]


def links(pid: int) -> list[str]:
    return [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]


def test_another_account_of_the_host_can_access_nothing_of_a_local_search(
    victim: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    pids = family(victim.pid)
    assert len(pids) >= 4, "the search, the server of its training processes, and two of them"
    aims = json.dumps([listening(pids), pids, named_sockets(pids), str(tmp_path)])
    tried = subprocess.run(
        [sys.executable, "-c", ATTACKER, aims], cwd="/", capture_output=True, text=True, timeout=300, check=False
    )
    assert tried.returncode == 0, tried.stderr
    assert json.loads(tried.stdout) == []


def test_the_dashboard_of_a_local_search_refuses_write_requests(victim: subprocess.Popen[bytes]) -> None:
    [port] = listening(family(victim.pid))
    base = f"http://127.0.0.1:{port}"
    with urlopen(f"{base}/sitemap.json", timeout=60) as answer:
        paths = json.loads(answer.read())["paths"]
    assert not [path for path in paths if re.search("proxy|api", path)]
    for path in ("/hpstage", "/info/main/workers.html", "/api/v1/retire_workers", f"/proxy/{port}/127.0.0.1/status"):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            with pytest.raises(HTTPError) as refused:
                urlopen(Request(base + path, data=b"{}", method=method), timeout=60)
            with refused.value as answer:
                assert answer.code in (403, 404, 405), (method, path)
