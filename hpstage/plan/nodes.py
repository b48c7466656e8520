"""The parts of the search plan's tree: nodes, the states on their lines, and the paths of trials. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hpstage.plan.facts import DriverId, Kept, NodeId, StateReached, StateRef, TrialId
from hpstage.plan.keys import History
from hpstage.plan.ordered import Ordered
from hpstage.plan.regimes import Regime, regime
from hpstage.plan.trail import Trail
from hpstage.schedule import Constant, Form, Plateau, Scalar, Schedule
from hpstage.schedule.scalars import same

# Shared by the many nodes and states that have none, and never changed.
_NONE: Ordered[int] = Ordered()
_NO_CHILDREN: dict[int, dict[tuple[object, ...], Node]] = {}
_NOBODY: dict[TrialId, DriverId] = {}
_TRUE, _FALSE = object(), object()  # stand in for booleans in look-ups, since True == 1 in Python


def distinct(value: Scalar) -> object:
    return value if value.__class__ is not bool else (_TRUE if value else _FALSE)


class State:
    """The state of a node's line after ``step`` steps: its metrics, its checkpoint, and the trials that wait for it."""

    __slots__ = ("bytes", "digest", "kept", "metrics", "node", "peak_bytes", "step", "unanswered", "used", "waiting")

    def __init__(self, node: Node, step: int) -> None:
        self.node = node
        self.step = step
        self.metrics: dict[str, float] | None = None
        self.kept: Kept | None = None
        self.digest: str | None = None  # of the first checkpoint kept, even after that is gone
        self.bytes: int | None = None  # of its last checkpoint, even after that is gone
        self.peak_bytes: int | None = None  # device memory of the steps before it: see StateReached
        self.used = 0.0  # when it was last kept or trained on from
        # Trials that asked for the metrics and have no answer yet, in order; also those whose driver is gone.
        self.unanswered: dict[TrialId, None] | None = None
        self.waiting = _NOBODY  # trials that wait for the metrics, in order, and their drivers

    @property
    def ref(self) -> StateRef:
        return StateRef(self.node.id, self.step)

    def wait(self, trial: TrialId, driver: DriverId) -> None:
        """Let a trial wait for the metrics."""
        if self.waiting is _NOBODY:
            self.waiting = {}
        self.waiting[trial] = driver

    def release(self) -> None:
        """Let no trial wait for the metrics."""
        self.waiting = _NOBODY

    def reach(self, fact: StateReached) -> None:
        """Take over what stays known of it whatever becomes of its checkpoint."""
        if fact.peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes or 0, fact.peak_bytes)
        if fact.kept is not None:
            self.bytes, self.digest = fact.kept.bytes, self.digest or fact.kept.digest
            self.used = max(self.used, fact.at)


class Node:
    """Training from step ``start`` on with one set of forms, continuing ``parent``'s line."""

    __slots__ = (
        "_history",
        "_trail",
        "children",
        "first",
        "forms",
        "id",
        "keep_at",
        "names",
        "parent",
        "reach",
        "seconds",
        "start",
        "states",
        "trained",
        "varying",
    )

    def __init__(
        self,
        id: NodeId,
        parent: Node | None,
        start: int,
        names: tuple[str, ...],
        forms: tuple[Form, ...],
        first: tuple[object, ...],
    ):
        self.id = id
        self.parent = parent
        self.start = start
        self.names = names  # sorted
        self.forms = forms  # in the order of names
        self.first = first  # their values at its start, as for look-ups
        self.varying = tuple([i for i, form in enumerate(forms) if form.__class__ is not Constant])
        self.children = _NO_CHILDREN  # by the step at which they begin, and their values there
        self.states: dict[int, State] = {}
        self.keep_at: Ordered[int] = _NONE  # steps at which trials state that they will be forked
        self.reach = start  # the farthest step that any trial asked for
        self.trained = 0  # steps trained, including repetitions
        self.seconds = 0.0  # training time of these steps
        self._history: History | None = None  # up to and including the values at its start
        self._trail: Trail | None = None  # from there on, if it varies

    def values(self, step: int) -> tuple[Scalar, ...]:
        return tuple(form.value(step) for form in self.forms)

    def hyperparameters(self, step: int) -> dict[str, Scalar]:
        return dict(zip(self.names, self.values(step), strict=True))

    @property
    def regime(self) -> Regime:
        return regime(self.names, self.forms)

    def ancestry(self) -> list[Node]:
        """Return the nodes of this node's line, from the root to itself."""
        line: list[Node] = []
        node: Node | None = self
        while node is not None:
            line.append(node)
            node = node.parent
        line.reverse()
        return line

    def step_seconds(self) -> float | None:
        """Return its measured seconds per step, or its nearest measured ancestor's, if there are any."""
        node: Node | None = self
        while node is not None and not node.trained:
            node = node.parent
        return None if node is None else node.seconds / node.trained

    def children_at(self, step: int) -> dict[tuple[object, ...], Node]:
        """Return the children that begin at a step, by their values there, for others to be added."""
        if self.children is _NO_CHILDREN:
            self.children = {}
        return self.children.setdefault(step, {})

    def begin(self, nothing: History) -> None:
        """Start a root's line with an empty history."""
        self._history = nothing.changed(0, zip(self.names, self.values(0), strict=True))

    def seen(self, step: int) -> History:
        """Return the history of values before ``step``, which must be after the node's start. O(1) for constant forms,
        otherwise amortised O(1) per step."""
        if self._history is None:
            assert self.parent is not None
            history = self.parent.seen(self.start)
            before = self.parent.values(self.start - 1)
            changed = [
                (name, now)
                for name, now, then in zip(self.names, self.values(self.start), before, strict=True)
                if not same(now, then)
            ]
            self._history = history.changed(self.start, changed) if changed else history
        if not self.varying:
            return self._history
        if self._trail is None:
            self._trail = Trail(self._history, self.start, dict(zip(self.names, self.forms, strict=True)))
        return self._trail.before(step)


def lines_beyond(node: Node, step: int, last: int) -> Iterator[tuple[Node, int]]:
    """Yield the lines that continue beyond step ``step`` of a node, each with the step after which its states are
    beyond: ``last`` on the node itself, and the start of each node below."""
    below = [(node, step, last)]
    while below:
        line, step, last = below.pop()
        yield line, last
        for at, children in line.children.items():
            if at > step:
                below += [(child, child.start, child.start) for child in children.values()]


@dataclass(slots=True)
class PlannedTrial:
    """A trial's path through the tree: node ``path[i]`` up to step ``stops[i]``."""

    id: TrialId
    steps: int
    path: tuple[Node, ...]
    stops: tuple[int, ...]
    schedules: Mapping[str, Schedule]
    keep_at: tuple[int, ...] = ()
    plateaus: Mapping[str, Plateau] = field(default_factory=dict)
    targets: dict[int, bool] = field(default_factory=dict)  # steps asked for, and whether their answer is counted
    asked: int = 0  # the farthest target
    answered: int = 0  # the farthest target whose answer is counted
    fresh: dict[NodeId, int] = field(default_factory=dict)  # steps per node that this trial was first to ask for

    @property
    def shared(self) -> int:
        """Number of its steps that another trial had asked for before."""
        return self.asked - sum(self.fresh.values())

    def shared_until(self, step: int) -> Iterator[tuple[Node, int]]:
        """Yield, for each node, the number of steps up to ``step`` that another trial had asked for before."""
        for node, start, stop in self.path_to(self.asked):
            # A node's fresh steps are its last ones.
            yield node, max(0, min(stop - self.fresh.get(node.id, 0), step) - start)

    def node_at(self, step: int) -> Node:
        """Return the node that holds the state after ``step`` steps (1 <= step <= steps)."""
        return self.path[bisect_left(self.stops, step)]

    def keep(self, steps: tuple[int, ...]) -> None:
        """Set the steps at which states on its path are to be kept."""
        self.keep_at = steps
        for step in steps:
            if step <= self.steps:
                node = self.node_at(step)
                if node.keep_at is _NONE:
                    node.keep_at = Ordered()
                node.keep_at.add(step)

    def states(self) -> Iterator[State]:
        """Yield the states on its path, as far as they are in the plan, in the order of their steps."""
        for node, start, stop in self.path_to(self.steps):
            yield from (node.states[step] for step in sorted(node.states) if start < step <= stop)

    def path_to(self, stop: int) -> Iterator[tuple[Node, int, int]]:
        """Yield ``(node, start, stop)`` along the path to step ``stop``."""
        start = 0
        for node, end in zip(self.path, self.stops, strict=True):
            if start >= stop:
                return
            yield node, start, end if end < stop else stop
            start = end
