"""The dependence of training on measurements that are made on request, as far as bytecode shows it.

In a stage tree, reports are requested at other steps than without sharing. So the code under ``if run.wants_report:``
must not influence steps without a report, nor later reports. In doubt, too many paths through the code are followed
rather than too few.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from dis import Instruction
from types import CodeType

from hpstage.training.capture.context_managers import swallowing
from hpstage.training.capture.liveness import Cut, accesses_of, all_instructions_of, always_after, live, reachable

_BETWEEN = ("CACHE", "TO_BOOL", "NOT_TAKEN", "EXTENDED_ARG")
_STORES = ("STORE_FAST", "STORE_DEREF")
_LOADS = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_DEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_READS = re.compile(r"GET_ITER|POP_JUMP|COMPARE_OP|IS_OP|CONTAINS_OP|TO_BOOL|UNARY_NOT|UNPACK_SEQUENCE")
"""Instructions that read the object loaded before them without changing it."""
_ITEM = re.compile(r"BINARY_SUBSCR|BINARY_OP \[\]")
_ENDINGS = (*_STORES, "POP_TOP", "RETURN", "JUMP", "POP_JUMP")
"""Instructions that use up the value of an expression."""
_ENDS = ("POP_TOP", "RETURN", "JUMP", "POP_JUMP")


@dataclass(frozen=True)
class OnRequest:
    """What a paused function does only where a report is wanted.

    Attributes:
        leaves: whether it leaves its loop there, without an error.
        assigned: variables that are assigned there, and read where no report is wanted.
        reported: variables that are assigned there, and reported with the next report.
        watched: variables that are used there, and only read elsewhere, each with the attribute (``.stop``) or item
            (``['bad']``) that is read elsewhere, or an empty string if any part may be.
    """

    leaves: bool = False
    assigned: frozenset[str] = frozenset()
    reported: frozenset[str] = frozenset()
    watched: frozenset[tuple[str, str]] = frozenset()


@functools.lru_cache(256)
def on_request(code: CodeType, offset: int, runs: frozenset[str]) -> OnRequest:
    """Return what ``code`` does where a report is wanted.

    Args:
        code: code of a frame.
        offset: where it is paused, as :func:`~hpstage.training.capture.liveness.place` returns it.
        runs: variables that hold a run.
    """
    function = _Function(code, offset, runs)
    if not function.cut and not function.counted:
        return OnRequest()
    assigned = function.assigned()
    matter = functools.partial(live, code, offset, untaken=swallowing(code))  # as if no block swallowed an exception
    return OnRequest(
        leaves=function.leaves(),
        assigned=assigned & matter(but=function.on_request),
        reported=assigned & matter() & function.reported(),
        watched=function.watched(),
    )


class _Function:
    def __init__(self, code: CodeType, offset: int, runs: frozenset[str]) -> None:
        self._code, self._offset, self._runs = code, offset, runs
        self._items = all_instructions_of(code)
        items = [item for item in self._items if item.opname not in (*_BETWEEN, "COPY")]
        requests = [at for at in range(len(items) - 1) if self._reads(items, at, "wants_report")]
        endings = (next(it for it in items[at + 1 :] if it.opname.startswith(_ENDINGS)) for at in requests)
        self.counted = frozenset(it.argval for it in endings if it.opname in _STORES)
        """Variables whose value is computed from whether a report is wanted."""
        self.cut = _cut(items[at + 1] for at in requests)
        """Jumps that test whether a report is wanted, each with whether it jumps if none is wanted."""
        tests = [at for at in range(len(items) - 1) if items[at].opname in _LOADS and items[at].argval in self.counted]
        self.cut |= _cut(items[at + 1] for at in tests)
        self._decided, known = self.cut, frozenset[str]()
        self.on_request = always_after(code, offset).between(self._decided)
        while self.counted | self._joins() != known:
            known = self.counted = self.counted | self._joins()
            for at, item in enumerate(items):
                if (item.opname in _STORES or _is_if(item)) and not known.isdisjoint(_read_before(items, at)):
                    if item.opname in _STORES:
                        self.counted |= {item.argval}
                    elif not any(offset == item.offset for offset, _ in self.cut):
                        self._decided |= {(item.offset, True), (item.offset, False)}
            self.on_request = always_after(code, offset).between(self._decided)

    def _joins(self) -> frozenset[str]:
        """Return the variables to which conditional expressions are assigned: they are stored where both ways join."""
        jumps = [
            *(self._items[at] for at in self.on_request),
            *(it for it in self._items if (it.offset, False) in self._decided),
        ]
        followed = {it.argval for it in jumps if "JUMP" in it.opname}
        followed |= {self._items[at + 1].offset for at in self.on_request if at + 1 < len(self._items)}
        return frozenset(it.argval for it in self._items if it.offset in followed and it.opname in _STORES)

    def _reads(self, items: Sequence[Instruction], at: int, name: str) -> bool:
        if not at or items[at].argval != name or items[at].opname not in _ATTRIBUTES:
            return False
        before = next(item for item in reversed(items[:at]) if item.opname not in _BETWEEN)
        held = before.argval[-1] if isinstance(before.argval, tuple) else before.argval
        return before.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and held in self._runs

    def assigned(self) -> frozenset[str]:
        stored = {name for at in self.on_request for read, name in accesses_of(self._code, at) if not read}
        return frozenset(stored | self._joins() | self.counted)

    def leaves(self) -> bool:
        plain = reachable(self._code, self._offset, handled=False)
        on_request = plain - reachable(self._code, self._offset, cut=self.cut, handled=False)
        return any(
            self._items[at].opname.startswith("RETURN_") or self._reads(self._items, at, "stop") for at in on_request
        )

    def reported(self) -> frozenset[str]:
        """Return the variables that are read by the arguments of ``run.report(...)``."""
        names: set[str] = set()
        for at in range(len(self._items)):
            if self._reads(self._items, at, "report"):
                for index in range(at, len(self._items)):
                    if self._items[index].opname.startswith(_ENDS):
                        break
                    names |= {name for read, name in accesses_of(self._code, index) if read}
        return frozenset(names)

    def watched(self) -> frozenset[tuple[str, str]]:
        used = {name for at in self.on_request for read, name in accesses_of(self._code, at) if read} - self._runs
        found: dict[str, set[str] | None] = {}
        for at in reachable(self._code, self._offset) - self.on_request:
            for read, name in accesses_of(self._code, at):
                if read and name in used:
                    part, parts = self._read_at(at), found.setdefault(name, set())
                    if part is None or parts is None:
                        found[name] = None
                    else:
                        parts.add(part)
        return frozenset((name, part) for name, parts in found.items() for part in parts or ())

    def _read_at(self, at: int) -> str | None:
        """Return which part of a variable is read where it is loaded; ``None`` if it may be changed."""
        items = self._items
        if not items[at].opname.startswith("LOAD_FAST") or isinstance(items[at].argval, tuple):
            return None
        before = next((item for item in reversed(items[:at]) if item.opname not in (*_BETWEEN, "PUSH_NULL")), items[at])
        after = [item for item in items[at + 1 :] if item.opname not in (*_BETWEEN, "PRECALL")]
        first, second = after[0], after[min(1, len(after) - 1)]  # of `return x`, only the first exists
        if first.opname == "LOAD_ATTR" and "NULL" not in first.argrepr:
            return f".{first.argval}"
        if _ITEM.match(f"{second.opname} {second.argrepr}") and first.opname.startswith(("LOAD_CONST", "LOAD_FAST")):
            return f"[{first.argval!r}]" if first.opname == "LOAD_CONST" else ""
        is_length = before.opname == "LOAD_GLOBAL" and before.argval == "len" and first.opname.startswith("CALL")
        return "" if is_length or _READS.match(first.opname) else None


def _is_if(item: Instruction) -> bool:
    return re.search("JUMP.*_IF_", item.opname) is not None


def _read_before(items: Sequence[Instruction], at: int) -> Iterator[str]:
    """Yield the variables that are loaded for the value that an instruction stores or tests."""
    for item in reversed(items[:at]):
        if item.opname.startswith(_ENDINGS) and not _is_if(item):
            return
        if item.opname in _LOADS:
            yield item.argval


def _cut(jumps: Iterable[Instruction]) -> Cut:
    return frozenset((it.offset, re.search("IF_(FALSE|NONE)$", it.opname) is not None) for it in jumps if _is_if(it))
