"""NodeTree: lays trials into the plan's tree, and adds nodes where their values diverge. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hpstage.plan.facts import NodeId, StateKey
from hpstage.plan.keys import ValueHistory
from hpstage.plan.nodes import Node, PlannedTrial, constants
from hpstage.plan.ordered import Ordered
from hpstage.schedule import Scalar, Schedule, agreement, constant
from hpstage.schedule.forms import Constant, Form
from hpstage.schedule.scalars import distinct, same
from hpstage.schedule.trial import pieces


class Roots(dict[tuple[object, ...], Node]):
    """The root nodes of all trials with the same names of hyperparameters, by the values at step 0; without sharing,
    by trial and values.

    ``names``: the names, in one tuple for all these nodes, since a copy in each would take as much memory as the
    values. ``nothing``: the empty history of trials that share.
    """

    __slots__ = ("names", "nothing")

    def __init__(self, names: tuple[str, ...], nothing: ValueHistory) -> None:
        super().__init__()
        self.names = names
        self.nothing = nothing


class NodeTree:
    """A compressed trie over the values at each step: see :mod:`hpstage.plan.plan`.

    ``sharing=False`` keeps every trial on a separate branch.
    """

    def __init__(self, workload: StateKey, *, sharing: bool) -> None:
        self.workload = workload
        self.sharing = sharing
        self.nodes: list[Node] = []
        self.defaults: dict[str, Scalar] = {}  # values of hyperparameters for trials without them
        self.lacking: dict[NodeId, tuple[str, ...]] = {}  # hyperparameters that the histories of old roots do not have
        self.milestones: Ordered[int] = Ordered()  # steps at which trials diverge anywhere in the tree
        self.branch_points: dict[int, int] = {}  # number of nodes that begin at each milestone
        self._roots: dict[tuple[str, ...], Roots] = {}  # by the names of their hyperparameters
        self._equal: dict[NodeId, list[Node]] = {}  # younger roots that a default has made equal to an older one
        self._siblings: dict[tuple[object, ...], Node] = {}  # nodes with siblings, by (parent, step, first values)

    def walk(self, trial: PlannedTrial, schedules: Mapping[str, Schedule], steps: int) -> Node:
        """Return the last node on the path of a trial, adding nodes where its values diverge from all existing ones.
        O(segments)."""
        schedules = self.filled(schedules)
        names = tuple(sorted(schedules))
        along = [schedules[name] for name in names]
        node: Node | None = None
        for step, stop, first, forms in pieces(along, steps):
            while step < stop:
                if node is not None:
                    if forms is None and node.curves is None:
                        if first == node.first:
                            break
                    elif (agreed := _agreement(forms or constants(first), node.forms, step, stop)) > step:
                        step = agreed
                        continue
                curves = None if forms is None else tuple(forms)
                if curves is not None:
                    first = tuple([distinct(form.value(step)) for form in curves])
                if node is None:
                    node = self._root(names, first, curves, trial)
                    if equal := self._equal.get(node.id):
                        node = max(node, *equal, key=lambda root: self._known(root, along, steps))
                else:
                    node = self.child_of(node, step, first) or self._child(node, step, first, curves, trial)
                if forms is None and node.curves is None:
                    break  # they agree to the end
        assert node is not None
        return node

    def _known(self, root: Node, schedules: Sequence[Schedule], steps: int) -> int:
        """Return the step up to which training under these schedules is known or requested, from a root that begins
        with their values."""
        node = root
        for step, stop, first, forms in pieces(schedules, steps):
            while step < stop:
                agreed = _agreement(forms or constants(first), node.forms, step, stop)
                if agreed == step:
                    values = first if forms is None else tuple([distinct(form.value(step)) for form in forms])
                    child = self.child_of(node, step, values)
                    if child is None or node.extent < step:
                        return min(node.extent, step)
                    node = child
                step = agreed
        return min(node.extent, steps)

    def _root(
        self, names: tuple[str, ...], first: tuple[object, ...], forms: tuple[Form, ...] | None, maker: PlannedTrial
    ) -> Node:
        roots = self.roots(names)
        root = roots.get(first if self.sharing else (maker.id, *first))
        if root is None:
            root = Node(NodeId(len(self.nodes)), None, 0, roots.names, first, forms, maker)
            self.begin(root)
            self.nodes.append(root)
        return root

    def roots(self, names: tuple[str, ...]) -> Roots:
        """Return the roots of the trials with hyperparameters of these names."""
        roots = self._roots.get(names)
        if roots is None:
            roots = self._roots[names] = Roots(names, ValueHistory.new(self.workload, names))
        return roots

    def begin(self, root: Node) -> None:
        """Register a root, so that trials that begin with its values find it, and start its history."""
        roots = self._enter(root)
        lacking = self.lacking.get(root.id, ())
        if lacking:
            roots = self.roots(tuple([name for name in root.names if name not in lacking]))
        nothing = roots.nothing if self.sharing else ValueHistory.new(self.workload, roots.names, salt=root.maker.id)
        root.begin(nothing, lacking)

    def _enter(self, root: Node) -> Roots:
        """Register a root under its first values, or as equal to an existing root with these values. Return the roots
        that have its names of hyperparameters."""
        roots = self.roots(root.names)
        found = roots.setdefault(root.first if self.sharing else (root.maker.id, *root.first), root)
        if found is not root:
            self._equal.setdefault(found.id, []).append(root)
        return roots

    # --- hyperparameters that are added later ----------------------------------------------------------------

    def filled(self, schedules: Mapping[str, Schedule]) -> Mapping[str, Schedule]:
        """Return a trial's schedules, and the defaults of the hyperparameters that it lacks."""
        if not self.defaults or self.defaults.keys() <= schedules.keys():
            return schedules
        return {**{name: constant(value) for name, value in self.defaults.items()}, **schedules}

    def default(self, defaults: Mapping[str, Scalar]) -> None:
        """Set values of hyperparameters for trials without them. O(nodes) if any of the hyperparameters is new.

        Existing nodes are changed in place. States that were trained without these hyperparameters keep their keys,
        which do not contain them. All other keys contain every value, since they must not depend on the defaults of
        another store.
        """
        new = {name: value for name, value in defaults.items() if name not in self.defaults}
        if not new:
            return
        self.defaults |= new
        roots = [node for node in self.nodes if node.parent is None]
        for root in roots:
            if lacking := tuple([name for name in new if name not in root.names]):
                self.lacking[root.id] = self.lacking.get(root.id, ()) + lacking
        for node in self.nodes:
            node.extend(self.roots(tuple(sorted({*node.names, *new}))).names, new)
        self._roots = {names: Roots(names, some.nothing) for names, some in self._roots.items()}
        self._equal.clear()
        for root in roots:
            self._enter(root)
        self.index_siblings()

    def index_siblings(self) -> None:
        """Index the nodes that have siblings, replacing the previous index. O(nodes)."""
        self._siblings = {
            (node.id, child.start, child.first): child
            for node in self.nodes
            if not isinstance(node._children, Node)
            for child in node._children
        }

    def child_of(self, parent: Node, step: int, first: tuple[object, ...]) -> Node | None:
        """Return the child that begins at a step with these values, if there is one."""
        children = parent._children
        if isinstance(children, Node):  # an only child is not indexed, which saves memory
            return children if children.start == step and children.first == first else None
        return self._siblings.get((parent.id, step, first)) if children else None

    def _child(
        self, parent: Node, step: int, first: tuple[object, ...], forms: tuple[Form, ...] | None, maker: PlannedTrial
    ) -> Node:
        child = Node(NodeId(len(self.nodes)), parent, step, parent.names, first, forms, maker)
        self.nodes.append(child)
        if isinstance(only := parent._children, Node):
            self._siblings[parent.id, only.start, only.first] = only
        if parent._children:
            self._siblings[parent.id, step, first] = child
        parent.attach(child)
        others = self.branch_points.get(step, 0)
        if not others:
            self.milestones.add(step)
        self.branch_points[step] = others + 1
        return child


def _agreement(forms: Iterable[Form], others: Iterable[Form], start: int, stop: int) -> int:
    """Return the first step in ``[start, stop)`` at which the values of any pair differ, or ``stop`` if none does."""
    for mine, other in zip(forms, others, strict=True):
        if mine is other:
            continue
        if mine.__class__ is Constant and other.__class__ is Constant:  # most are
            if not same(mine.scalar, other.scalar):
                return start
            continue
        stop = agreement(other, mine, start, stop)
        if stop == start:
            break
    return stop
