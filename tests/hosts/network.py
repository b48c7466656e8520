"""Hosts on one machine: network namespaces on a bridge, each with an address and a host name of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path

from hpstage.checkpoints.processes import is_alive
from tests.faults.site import ROOT, members

_SUBNET = IPv4Network("10.213.8.0/24")
_SWITCH = "switch"


class NoNetwork(Exception):
    """Namespaces cannot be made here; says why."""


@dataclass
class Process:
    """A process on a host, in a session of its own."""

    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """With all that it has started."""
        for pid in members(self.popen.pid):
            os.kill(pid, signal.SIGKILL)
        self.popen.wait()


@dataclass
class Host:
    """``name`` is what the host's processes take for the name of theirs."""

    name: str
    address: str
    _network: Network
    _started: list[Process] = field(default_factory=list)

    def run(self, *command: str, **environment: str) -> Process:
        """Start a process here; relative paths are of the repository."""
        log = self._network.folder / f"{self.name}.{len(self._started)}.log"
        # A hostname of its own, then the command in the same process: its id is that of the Popen.
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        with log.open("wb") as output:
            popen = subprocess.Popen(
                ["ip", "netns", "exec", self._network.namespace(self.name), *named, *command],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(Process(popen, log))
        return self._started[-1]

    def python(self, *words: str, **environment: str) -> Process:
        """``python -m ...``"""
        return self.run(sys.executable, "-m", *words, **environment)

    def cut(self) -> None:
        """Pull the plug: nothing goes in or out."""
        _ip("-n", self._network.namespace(_SWITCH), "link", "set", "dev", f"port-{self.name}", "down")

    def ignore(self, other: Host) -> None:
        """Answer the other no more, while hearing it: what it sends arrives, and it cannot know."""
        _ip("-n", self._network.namespace(self.name), "route", "add", "blackhole", f"{other.address}/32")

    def heal(self) -> None:
        """As if there had been neither."""
        _ip("-n", self._network.namespace(_SWITCH), "link", "set", "dev", f"port-{self.name}", "up")
        _ip("-n", self._network.namespace(self.name), "route", "flush", "type", "blackhole")

    def kill(self) -> None:
        for process in self._started:
            process.kill()


class Network:
    """A bridge and the hosts on it; leaving the context kills their processes and takes all of it away.

    Args:
        folder: for logs.
        names: of the hosts.

    Raises:
        NoNetwork: on entering.
    """

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder
        addresses = _SUBNET.hosts()
        self.hosts = {name: Host(name, str(next(addresses)), self) for name in names}
        self._made: list[str] = []

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def namespace(self, host: str) -> str:
        """Its name; two runs on one machine have different ones."""
        return f"hpstage-{os.getpid()}-{host}"

    def __enter__(self) -> Network:
        if os.geteuid() != 0:
            raise NoNetwork("network namespaces need root")
        for program in ("ip", "unshare", "hostname"):
            if shutil.which(program) is None:
                raise NoNetwork(f"there is no program {program}")
        _sweep()
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        try:
            switch = self._add(_SWITCH)
            _ip("-n", switch, "link", "add", "name", "bridge0", "type", "bridge")
        except subprocess.CalledProcessError as error:
            raise NoNetwork(f"no namespaces can be made here: {error.stderr.strip()}") from error
        _ip("-n", switch, "link", "set", "dev", "bridge0", "up")
        for name, host in self.hosts.items():
            space, port = self._add(name), f"port-{name}"
            _ip("-n", switch, "link", "add", "name", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", switch, "link", "set", "dev", port, "master", "bridge0", "up")
            _ip("-n", space, "address", "add", f"{host.address}/{_SUBNET.prefixlen}", "dev", "eth0")
            _ip("-n", space, "link", "set", "dev", "eth0", "up")
            _ip("-n", space, "link", "set", "dev", "lo", "up")

    def _add(self, host: str) -> str:
        name = self.namespace(host)
        _ip("netns", "add", name)
        self._made.append(name)
        return name

    def __exit__(self, *error: object) -> None:
        for host in self.hosts.values():
            host.kill()
        while self._made:
            _ip("netns", "delete", self._made.pop())


def _sweep() -> None:
    """Take away what runs that were killed have left, their processes included."""
    for name in re.findall(r"^hpstage-\d+-\w+", _ip("netns", "list"), re.MULTILINE):
        if not is_alive(int(name.split("-")[1])):
            for pid in _ip("netns", "pids", name).split():
                with suppress(ProcessLookupError):  # its parent is killed already, and took it along
                    os.kill(int(pid), signal.SIGKILL)
            _ip("netns", "delete", name)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
