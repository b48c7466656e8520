"""The classes of the search plan's tree: Node, State, PlannedTrial (the path of a trial). Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from hpstage.plan.facts import Kept, NodeId, StateReached, StateRef, TrialId
from hpstage.plan.keys import ValueHistory
from hpstage.plan.ordered import Ordered
from hpstage.plan.regimes import Regime, regime
from hpstage.plan.trail import Trail
from hpstage.schedule import Constant, Form, Plateau, Scalar, Schedule, Segment
from hpstage.schedule.scalars import distinct, plain, same

# A plan has many nodes, states and trials, and most of their collections are empty. The method that first adds to a
# collection creates it; until then it is one of these shared ones, which are never changed.
_NONE: Ordered[int] = Ordered()
_NO_CHILDREN: Sequence[Node] = ()
_NO_STATES: dict[int, State] = {}
_NO_PLATEAUS: Mapping[str, Plateau] = {}


class State:
    """The state of a node's branch after ``step`` steps: its metrics, its checkpoint and its waiting trials."""

    __slots__ = ("bytes", "digest", "kept", "metrics", "node", "peak_bytes", "step", "unanswered", "used")

    def __init__(self, node: Node, step: int) -> None:
        self.node = node
        self.step = step
        self.metrics: dict[str, float] | None = None
        self.kept: Kept | None = None
        self.digest: str | None = None  # of the first checkpoint kept, even after that is gone
        self.bytes: int | None = None  # of its last checkpoint, even after that is gone
        self.peak_bytes: int | None = None  # device memory of the steps before it: see StateReached
        self.used = 0.0  # when it was last kept or trained on from
        # Trials that requested the metrics and have no result yet, in order; also those whose driver is gone.
        self.unanswered: list[TrialId] | None = None

    @property
    def ref(self) -> StateRef:
        return StateRef(self.node.id, self.step)

    @property
    def is_known(self) -> bool:
        """Whether the state was reached and evaluated, or kept."""
        return self.metrics is not None or self.digest is not None

    def reach(self, fact: StateReached) -> None:
        """Store the facts about it that hold even after its checkpoint is gone."""
        if fact.peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes or 0, fact.peak_bytes)
        if fact.kept is not None:
            self.bytes, self.digest = fact.kept.bytes, self.digest or fact.kept.digest
            self.used = max(self.used, fact.at)


class Node:
    """Training from step ``start`` on with one set of forms, continuing ``parent``'s branch.

    Args:
        names: names of the hyperparameters, sorted.
        first: their values at the node's start, in the form for look-ups (:func:`hpstage.schedule.scalars.distinct`).
        curves: their forms, in the order of names, if any of them varies.
        maker: the trial that the node was created for.
    """

    __slots__ = (
        "_children",
        "_history",
        "_states",
        "_trail",
        "curves",
        "first",
        "id",
        "keep_at",
        "maker",
        "names",
        "parent",
        "seconds",
        "start",
        "trained",
    )

    def __init__(
        self,
        id: NodeId,
        parent: Node | None,
        start: int,
        names: tuple[str, ...],
        first: tuple[object, ...],
        curves: tuple[Form, ...] | None,
        maker: PlannedTrial,
    ) -> None:
        self.id = id
        self.parent = parent
        self.start = start
        self.names = names
        self.first = first
        self.curves = curves
        self.maker = maker
        self._children: Node | Sequence[Node] = _NO_CHILDREN  # in the order of their starts; often a single one
        self._states: State | dict[int, State] = _NO_STATES  # by step; mostly a single one
        self.keep_at: Ordered[int] = _NONE  # steps at which trials state that they will be forked
        self.trained = 0  # steps trained, including repetitions
        self.seconds = 0.0  # training time of these steps
        self._history: ValueHistory | None = None  # up to and including the values at its start
        self._trail: Trail | None = None  # histories from there on, if any form varies

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms of the hyperparameters, in the order of their names."""
        return constants(self.first) if self.curves is None else self.curves

    @property
    def varying(self) -> tuple[int, ...]:
        """The indices of the hyperparameters whose values vary."""
        if self.curves is None:
            return ()
        return tuple([i for i, form in enumerate(self.curves) if form.__class__ is not Constant])

    def values(self, step: int) -> tuple[Scalar, ...]:
        if self.curves is None:
            return tuple([plain(value) for value in self.first])
        return tuple([form.value(step) for form in self.curves])

    def hyperparameters(self, step: int) -> dict[str, Scalar]:
        return dict(zip(self.names, self.values(step), strict=True))

    @property
    def regime(self) -> Regime:
        root = self
        while root.parent is not None:
            root = root.parent
        return regime(self.names, self.forms, root.forms)

    def ancestry(self) -> list[Node]:
        """Return the nodes of this node's branch, from the root to itself."""
        branch: list[Node] = []
        node: Node | None = self
        while node is not None:
            branch.append(node)
            node = node.parent
        branch.reverse()
        return branch

    def path_to(self, stop: int) -> list[tuple[Node, int, int]]:
        """Return ``(node, start, stop)`` along this node's branch, from step 0 to step ``stop``."""
        path = []
        node: Node | None = self
        while node is not None:
            if node.start < stop:
                path.append((node, node.start, stop))
                stop = node.start
            node = node.parent
        path.reverse()
        return path

    def step_seconds(self) -> float | None:
        """Return its measured seconds per step, or else its nearest measured ancestor's, or else ``None``."""
        node: Node | None = self
        while node is not None and not node.trained:
            node = node.parent
        return None if node is None else node.seconds / node.trained

    @property
    def children(self) -> Sequence[Node]:
        """The nodes that branch from it, in the order of their starts."""
        children = self._children
        return (children,) if isinstance(children, Node) else children

    def children_at(self, step: int) -> Sequence[Node]:
        """Return the children that begin at a step."""
        children = self.children
        return children[bisect_left(children, step, key=_start) : bisect_right(children, step, key=_start)]

    def attach(self, child: Node) -> None:
        if isinstance(self._children, list):
            insort(self._children, child, key=_start)
        else:
            self._children = sorted([*self.children, child], key=_start) if self._children else child

    @property
    def states(self) -> Mapping[int, State]:
        """The states of the node's branch by their steps, in the order of their creation."""
        states = self._states
        return {states.step: states} if isinstance(states, State) else states

    @property
    def extent(self) -> int:
        """The farthest step at which the node has a state, requested or trained, or a child; else its start."""
        return max([self.start, *self.states, *(child.start for child in self.children[-1:])])

    def state(self, step: int) -> State | None:
        """Return the state at a step, if the plan has it."""
        states = self._states
        if isinstance(states, State):
            return states if states.step == step else None
        return states.get(step)

    def ensure_state(self, step: int) -> State:
        """Return the state at a step, creating it if needed."""
        state = self.state(step)
        if state is None:
            state = State(self, step)
            if self._states is _NO_STATES:
                self._states = state
            else:
                self._states = {**self.states, step: state} if isinstance(self._states, State) else self._states
                self._states[step] = state
        return state

    def begin(self, nothing: ValueHistory, lacking: Sequence[str]) -> None:
        """Start the history of a root's branch: the root's values, except those of the ``lacking`` hyperparameters."""
        values: Iterable[tuple[str, Scalar]] = zip(self.names, self.values(0), strict=True)
        if lacking:
            values = [(name, value) for name, value in values if name not in lacking]
        self._history = nothing.changed(0, values)

    def extend(self, names: tuple[str, ...], constant: Mapping[str, Scalar]) -> None:
        """Add hyperparameters that do not vary, with these values. ``names``: all names after that."""
        forms = dict(zip(self.names, self.forms, strict=True))
        firsts = dict(zip(self.names, self.first, strict=True))
        self.first = tuple([firsts[name] if name in firsts else distinct(constant[name]) for name in names])
        if self.curves is not None:
            self.curves = tuple([forms[name] if name in forms else Constant(constant[name]) for name in names])
        self.names = names

    def history_before(self, step: int) -> ValueHistory:
        """Return the history of values before ``step``, which must be after the node's start. O(1) for constant forms,
        otherwise amortised O(1) per step."""
        if self._history is None:
            assert self.parent is not None
            history = self.parent.history_before(self.start)
            before = self.parent.values(self.start - 1)
            changed = [
                (name, now)
                for name, now, then in zip(self.names, self.values(self.start), before, strict=True)
                if not same(now, then)
            ]
            self._history = history.changed(self.start, changed) if changed else history
        if self.curves is None:
            return self._history
        if self._trail is None:
            self._trail = Trail(self._history, self.start, dict(zip(self.names, self.curves, strict=True)))
        return self._trail.history_before(step)


_start = attrgetter("start")


def constants(values: Iterable[object]) -> tuple[Form, ...]:
    """Return constant forms of values that are stored for look-ups."""
    return tuple([Constant(plain(value)) for value in values])


def branches_beyond(node: Node, step: int, last: int) -> Iterator[tuple[Node, int]]:
    """Yield the node and the nodes below it that begin beyond ``step``, each with the step beyond which its states are
    meant: ``last`` for the node itself, and the start of each node below."""
    below = [(node, step, last)]
    while below:
        branch, step, last = below.pop()
        yield branch, last
        below += [(child, child.start, child.start) for child in branch.children if child.start > step]


def first_walked(path: Iterable[tuple[Node, int, int]], reach: dict[NodeId, int]) -> Iterator[tuple[Node, int, int]]:
    """Yield the pieces of a path that were not walked before. ``reach``: up to which step each node was walked; it is
    updated."""
    for node, start, stop in path:
        start = max(start, reach.get(node.id, start))
        if start < stop:
            reach[node.id] = stop
            yield node, start, stop


class PlannedTrial:
    """A trial's path through the tree: the branch of its last node, up to its last step."""

    __slots__ = (
        "answered",
        "id",
        "keep_at",
        "last",
        "plateaus",
        "requested",
        "steps",
        "study",
        "targets",
    )

    def __init__(self, id: TrialId, steps: int) -> None:
        self.id = id
        self.steps = steps
        self.last: Node  # set as it is added to the tree
        self.study = ""  # empty until a step is requested
        self.keep_at: tuple[int, ...] = ()
        self.plateaus = _NO_PLATEAUS
        self.targets: tuple[int, ...] = ()  # steps requested, ascending
        self.requested = 0  # the farthest target
        self.answered = 0  # the farthest target with a result

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The trial's schedules up to its last step, from the forms on its path."""
        path = [(node.forms, stop - start) for node, start, stop in self.path_to(self.steps)]
        return {
            name: Schedule(tuple([Segment(forms[i], length) for forms, length in path]))
            for i, name in enumerate(self.last.names)
        }

    def has(self, schedules: Mapping[str, Schedule], steps: int) -> bool:
        """Return whether these are the trial's schedules up to ``steps``, which is not beyond its last step."""
        own = self.schedules
        return schedules.keys() == own.keys() and all(
            schedule.until(steps) == own[name].until(steps) for name, schedule in schedules.items()
        )

    @property
    def root(self) -> Node:
        """The node in which its training begins. O(segments)."""
        return self.node_at(1)

    def node_at(self, step: int) -> Node:
        """Return the node that holds the state after ``step`` steps (1 <= step <= steps). O(segments after it)."""
        node = self.last
        while node.start >= step:
            assert node.parent is not None, f"step {step} is before the first"
            node = node.parent
        return node

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
        """Yield the plan's states on its path, in the order of their steps."""
        for node, start, stop in self.path_to(self.steps):
            states = node.states
            yield from (states[step] for step in sorted(states) if start < step <= stop)

    def path_to(self, stop: int) -> list[tuple[Node, int, int]]:
        """Return ``(node, start, stop)`` along the path to step ``stop``. O(segments)."""
        return self.last.path_to(min(stop, self.steps))
