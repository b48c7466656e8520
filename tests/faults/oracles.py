"""What must hold whatever broke, found out without hpstage's own planning: each check returns what it found amiss.

The journal is folded here a second time, from raw JSON: nothing of ``SearchPlan`` is used.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from hpstage.checkpoints import FolderCheckpoints
from hpstage.errors import CheckpointCorrupt, CheckpointMissing
from hpstage.plan.log import split
from hpstage.store.cursor import HASH_LENGTH
from tests.faults import work


def raw_journal(client: redis.Redis, prefix: str) -> list[bytes]:
    """The records as they stand in Redis, read without hpstage."""
    return [fields[b"r"][:-HASH_LENGTH] for _, fields in client.xrange(f"{{{prefix}}}:log")]


# --- the journal ------------------------------------------------------------------------------------------


@dataclass
class _Chain:
    driver: str
    left: list[list[int]] = field(default_factory=list)  # [node, start, stop] not reached yet, in order

    def claim(self, spans: Iterable[dict[str, Any]]) -> None:
        for span in spans:
            node, start, stop = span["node"], span["start"], span["stop"]
            if self.left and self.left[-1][0] == node and self.left[-1][2] == start:
                self.left[-1][2] = stop
            else:
                self.left.append([node, start, stop])

    def reach(self, node: int, start: int, step: int) -> bool:
        """Advance to ``step``; ``False`` if these steps are not what comes next of what was claimed."""
        for index, (its_node, its_start, its_stop) in enumerate(self.left):
            if its_node == node:
                if start != its_start or not start <= step <= its_stop:
                    return False
                self.left = [[node, step, its_stop], *self.left[index + 1 :]]
                return True
        return False


class Fold:
    """Owners and states according to the journal; ``violations`` names the records that break the rules."""

    def __init__(self, records: Sequence[bytes]) -> None:
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.live: dict[str, dict[str, Any]] = {}  # drivers that have not left
        self.chains: dict[str, _Chain] = {}
        self.kept: dict[tuple[int, int], str] = {}  # states whose checkpoint is said to be there, and its key
        self.digests: dict[str, str] = {}  # of each key that was ever kept
        self.written_off: dict[str, str] = {}  # keys that were lost and not evicted, and why
        self._left: set[str] = set()
        self._metrics: dict[tuple[int, int], object] = {}
        self._position = 0
        for self._position, record in enumerate(records):
            for fact in map(json.loads, split(record)):
                self.counts[fact["type"]] += 1
                handler = getattr(self, f"_{fact['type']}", None)
                if handler is not None:
                    handler(fact)

    def _violate(self, text: str) -> None:
        self.violations.append(f"record {self._position}: {text}")

    def _alive(self, driver: str, what: str) -> None:
        if driver not in self.live:
            story = "which had left" if driver in self._left else "which never joined"
            self._violate(f"{what} by driver {driver}, {story}")

    def _chain(self, name: str, what: str) -> _Chain | None:
        chain = self.chains.get(name)
        if chain is None:
            self._violate(f"{what} by chain {name}, which is over or never began")
        else:
            self._alive(chain.driver, what)
        return chain

    def _PlanCreated(self, fact: dict[str, Any]) -> None:
        if self._position:
            self._violate("a plan was created for the second time")

    def _DriverJoined(self, fact: dict[str, Any]) -> None:
        known = self.live.get(fact["driver"])
        # One whose cluster came back as another says so by joining again.
        same = known is not None and all(known[name] == fact[name] for name in ("host", "pid"))
        if fact["driver"] in self._left or (known is not None and (not same or known["pool"] == fact["pool"])):
            self._violate(f"driver {fact['driver']} joined twice")
        self.live[fact["driver"]] = fact

    def _DriverLeft(self, fact: dict[str, Any]) -> None:
        driver = fact["driver"]
        if fact["reason"] == "ended":
            self._alive(driver, "DriverLeft")
        # Two may find out at the same time that a third is gone.
        self.counts[f"DriverLeft: {fact['reason']}"] += driver in self.live
        self.live.pop(driver, None)
        self._left.add(driver)
        for name in [name for name, chain in self.chains.items() if chain.driver == driver]:
            del self.chains[name]

    def _TargetAsked(self, fact: dict[str, Any]) -> None:
        self._alive(fact["driver"], "TargetAsked")

    def _ChainStarted(self, fact: dict[str, Any]) -> None:
        self._alive(fact["driver"], "ChainStarted")
        if fact["chain"] in self.chains:
            self._violate(f"chain {fact['chain']} was started twice")
        self.chains[fact["chain"]] = _Chain(fact["driver"])
        self._claim(fact)

    def _ChainProlonged(self, fact: dict[str, Any]) -> None:
        if self._chain(fact["chain"], "ChainProlonged") is not None:
            self._claim(fact)

    def _claim(self, fact: dict[str, Any]) -> None:
        for span in fact["spans"]:
            for name, other in self.chains.items():
                for node, start, stop in other.left:
                    if node == span["node"] and start < span["stop"] and span["start"] < stop:
                        self._violate(
                            f"chain {fact['chain']} claims [{span['start']}, {span['stop']}) of node {node}, of "
                            f"which {name} holds [{start}, {stop})"
                        )
        self.chains[fact["chain"]].claim(fact["spans"])

    def _ChainClosed(self, fact: dict[str, Any]) -> None:
        self._chain(fact["chain"], "ChainClosed")
        self.chains.pop(fact["chain"], None)

    def _StateReached(self, fact: dict[str, Any]) -> None:
        node, start, step = fact["node"], fact["start"], fact["step"]
        chain = self._chain(fact["chain"], "StateReached")
        if chain is not None and not chain.reach(node, start, step):
            self._violate(
                f"chain {fact['chain']} reached [{start}, {step}) of node {node}; what it had left was {chain.left}"
            )
        self.counts["steps committed"] += step - start
        if fact.get("metrics") is not None:
            known = self._metrics.setdefault((node, step), fact["metrics"])
            if known != fact["metrics"]:
                self._violate(f"step {step} of node {node} has the metrics {fact['metrics']}, and had {known}")
        if fact.get("kept") is not None:
            key, digest = fact["kept"]["key"], fact["kept"]["digest"]
            self.kept[node, step] = key
            if self.digests.setdefault(key, digest) != digest:
                self._violate(f"state {key} was kept with the digest {digest}, and before with {self.digests[key]}")

    def _ChainLost(self, fact: dict[str, Any]) -> None:
        self.counts[f"ChainLost: {fact['outcome']}"] += 1

    def _StateLost(self, fact: dict[str, Any]) -> None:
        key = self.kept.pop((fact["node"], fact["step"]), None)
        if key is None:
            self._violate(f"step {fact['step']} of node {fact['node']} was lost but not kept")
        elif fact["reason"] != "evicted":
            self.written_off[key] = fact["message"]


def check_journal(records: Sequence[bytes]) -> list[str]:
    """No state was committed by two owners, none by one that had left, none that was not claimed; equal keys, equal
    contents."""
    return Fold(records).violations


def check_written_off(records: Sequence[bytes], damaged: set[str]) -> list[str]:
    """No state was written off whose checkpoint nobody has spoilt."""
    lost = Fold(records).written_off
    return [f"state {key} was written off: {reason}" for key, reason in lost.items() if key not in damaged]


def check_failures(records: Iterable[bytes]) -> list[str]:
    """No stage failed: nothing in the work does."""
    facts = (json.loads(fact) for record in records for fact in split(record))
    return [f"a stage failed: {fact['failure']['summary']}" for fact in facts if fact["type"] == "StageFailed"]


def record_hash(record: bytes) -> str:
    return hashlib.sha256(record).hexdigest()


def check_acknowledged(
    records: Sequence[bytes], folder: Path, lost: Set[tuple[int, str]] = frozenset[tuple[int, str]]()
) -> list[str]:
    """Every record acknowledged to a driver is at that position, except those the store was made to lose."""
    amiss = []
    for path in sorted(folder.glob("*.acknowledged-*")):
        for line in path.read_text().splitlines():
            position, _, digest = line.partition(" ")
            if len(digest) != 64:
                continue  # its driver was killed while it wrote
            place = int(position)
            there = place < len(records) and record_hash(records[place]) == digest
            if not there and (place, digest) not in lost:
                amiss.append(f"{path.name} has an acknowledgement of record {position}, which is missing")
    return amiss


# --- the studies ------------------------------------------------------------------------------------------


def check_study(found: Path, expected: Path) -> list[str]:
    """Every trial ended with the parameters, state, value and intermediate values of the undisturbed study."""
    here, there = json.loads(found.read_text()), json.loads(expected.read_text())
    amiss = [
        f"{found.name}: trial {index} is {mine}, and undisturbed {theirs}"
        for index, (mine, theirs) in enumerate(zip(here, there, strict=False))
        if mine != theirs
    ]
    if len(here) != len(there):
        amiss.append(f"{found.name}: {len(here)} trials, and undisturbed {len(there)}")
    return amiss


def check_values(found: Path, round: int, trials: int) -> list[str]:
    """As many trials as requested have ended, and each has the values that it has without sharing.

    For a search whose store has lost records: it may have proposed forgotten trials once more.
    """
    listed = json.loads(found.read_text())
    amiss = []
    if len(listed) < trials:
        amiss.append(f"{found.name}: {len(listed)} trials of {trials}")
    for index, (params, state, value, reported, *_) in enumerate(listed):
        expected = work.metrics_without_sharing(round, params)
        name = "score" if found.name.startswith("halving") else "hash"
        if state not in ("COMPLETE", "PRUNED"):
            amiss.append(f"{found.name}: trial {index} ended as {state}")
        for step, one in (*reported.items(), *([(work.STEPS, value)] if state == "COMPLETE" else [])):
            if one != expected[int(step)][name]:
                amiss.append(
                    f"{found.name}: trial {index} has {one} at step {step}, and alone {expected[int(step)][name]}"
                )
    return amiss


# --- what is left behind ----------------------------------------------------------------------------------


def check_checkpoints(path: Path, records: Sequence[bytes], damaged: set[str]) -> list[str]:
    """Nothing half-written is left; what is published is what the journal says it is, or is found to be spoilt.

    ``damaged``: keys of checkpoints that were spoilt on purpose.
    """
    fold = Fold(records)
    created = json.loads(records[0])
    store = FolderCheckpoints(path, created["workload"])  # sweeps what the dead have left
    aside = path / ".tmp"
    amiss = [f"{rest} was left behind" for rest in (aside.iterdir() if aside.exists() else [])]
    published = set(store.keys())
    for key in sorted(published):
        if key not in fold.digests:
            continue  # its worker, or its driver, died before it could report it
        try:
            store.load(key)
            digest = store.manifest(key).digest
        except (CheckpointCorrupt, CheckpointMissing) as error:
            if key not in damaged:
                amiss.append(f"checkpoint {key} cannot be loaded: {error}")
            continue
        if digest != fold.digests[key]:
            amiss.append(f"checkpoint {key} has the digest {digest}, in the journal {fold.digests[key]}")
    for key in sorted(set(fold.kept.values()) - published - damaged):
        amiss.append(f"checkpoint {key} is kept, says the journal, and is not there")
    return amiss


def check_leases(client: redis.Redis, prefix: str) -> list[str]:
    """Nobody holds a lease. Those of the dead stand there, and have expired."""
    seconds, micros = client.time()
    offset = int(client.hget(f"{{{prefix}}}:about", "offset") or 0)
    now = seconds * 10**6 + micros + offset
    amiss = []
    for name, value in client.hgetall(f"{{{prefix}}}:leases").items():
        _, expires, owner = value.split(b" ", 2)
        if int(expires) > now:
            amiss.append(f"the lease {name.decode()} is held by {owner.decode()} for {(int(expires) - now) / 1e6} s")
    return amiss
