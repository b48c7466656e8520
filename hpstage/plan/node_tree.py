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
            step = start
            while step < stop:
                if node is not None:
                    if forms is node.forms or (agreed := _agreement(forms, node.forms, step, stop)) == stop:
                        break
                    if agreed > step:
                        step = agreed
                        continue
                values = tuple([distinct(form.value(step)) for form in forms])
                if node is None:
                    siblings, values = self._roots, (salt, names, values)
                else:
                    path.append(node)
                    stops.append(step)
                    siblings = node.children.setdefault(step, {})
                child = siblings.get(values)
                if child is None:
                    child = siblings[values] = self._grow(node, step, names, forms)
                    if node is None:
                        child.begin(History.new(self.workload, names, salt=salt))
                node = child
        assert node is not None
        path.append(node)
        stops.append(fact.steps)
        return tuple(path), tuple(stops)

    def _grow(self, parent: Node | None, step: int, names: tuple[str, ...], forms: tuple[Form, ...]) -> Node:
        node = Node(NodeId(len(self.nodes)), parent, step, names, forms)
        self.nodes.append(node)
        if parent is not None:
            others = self.partings.get(step, 0)
            if not others:
                self.milestones.add(step)
            self.partings[step] = others + 1
        return node


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
