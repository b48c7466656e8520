"""The tree of a plan's nodes, and the paths of trials through it. Pure."""

from __future__ import annotations

from hpstage.plan.facts import NodeId, StateKey, TrialAdded
from hpstage.plan.keys import History
from hpstage.plan.nodes import Node, distinct
from hpstage.plan.ordered import Ordered
from hpstage.schedule import agreement
from hpstage.schedule.forms import Constant, Form
from hpstage.schedule.scalars import same
from hpstage.schedule.trial import pieces


class NodeTree:
    """A compressed trie over the values at each step: see :mod:`hpstage.plan.plan`.

    ``sharing=False`` keeps every trial on a separate line.
    """

    def __init__(self, workload: StateKey, *, sharing: bool) -> None:
        self.workload = workload
        self.sharing = sharing
        self.nodes: list[Node] = []
        self.milestones: Ordered[int] = Ordered()  # steps at which trials part anywhere in the tree
        self.partings: dict[int, int] = {}  # number of nodes that begin at each milestone
        self._roots: dict[tuple[object, ...], Node] = {}

    def walk(self, fact: TrialAdded) -> tuple[tuple[Node, ...], tuple[int, ...]]:
        """Return the trial's path and stops, adding nodes where its values part from all existing ones. O(segments)."""
        names = tuple(sorted(fact.schedules))
        salt = "" if self.sharing else fact.trial
        node: Node | None = None
        path: list[Node] = []
        stops: list[int] = []
        for start, stop, forms in pieces([fact.schedules[name] for name in names], fact.steps):
            step, fixed = start, _fixed(forms)
            while step < stop:
                if node is not None and fixed is not None and not node.varying:
                    if fixed == node.first:
                        break
                elif node is not None:
                    if forms is node.forms or (agreed := _agreement(forms, node.forms, step, stop)) == stop:
                        break
                    if agreed > step:
                        step = agreed
                        continue
                first = tuple([distinct(form.value(step)) for form in forms]) if fixed is None else fixed
                siblings, values = self._roots, first
                if node is None:
                    values = (salt, names, first)
                else:
                    path.append(node)
                    stops.append(step)
                    siblings = node.children_at(step)
                child = siblings.get(values)
                if child is None:
                    child = siblings[values] = self._grow(node, step, names, forms, first)
                    if node is None:
                        child.begin(History.new(self.workload, names, salt=salt))
                node = child
        assert node is not None
        path.append(node)
        stops.append(fact.steps)
        return tuple(path), tuple(stops)

    def _grow(
        self,
        parent: Node | None,
        step: int,
        names: tuple[str, ...],
        forms: tuple[Form, ...],
        first: tuple[object, ...],
    ) -> Node:
        if parent is not None:
            names = (
                parent.names
            )  # equal ones: a copy for each trial would take as much memory again as the node's forms
        node = Node(NodeId(len(self.nodes)), parent, step, names, forms, first)
        self.nodes.append(node)
        if parent is not None:
            others = self.partings.get(step, 0)
            if not others:
                self.milestones.add(step)
            self.partings[step] = others + 1
        return node


def _fixed(forms: tuple[Form, ...]) -> tuple[object, ...] | None:
    """Return the values of forms of which none varies, as for look-ups; ``None`` if one does."""
    values: list[object] = []
    for form in forms:
        if form.__class__ is not Constant:
            return None
        value = form.scalar
        values.append(distinct(value) if value.__class__ is bool else value)
    return tuple(values)


def _agreement(forms: tuple[Form, ...], others: tuple[Form, ...], start: int, stop: int) -> int:
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
