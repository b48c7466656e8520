"""The tree of a plan's nodes, and the paths of trials through it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hpstage.plan.facts import NodeId, StateKey, TrialId
from hpstage.plan.keys import History
from hpstage.plan.nodes import Node, PlannedTrial
from hpstage.plan.ordered import Ordered
from hpstage.schedule import Schedule, agreement
from hpstage.schedule.forms import Constant, Form
from hpstage.schedule.scalars import distinct, same
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
        # By the values with which they begin, as for look-ups: roots by (salt, names, values), others by (parent, step,
        # values).
        self._begun: dict[tuple[object, ...], Node] = {}

    def add(self, id: TrialId, schedules: Mapping[str, Schedule], steps: int) -> PlannedTrial:
        """Return a new trial, adding nodes where its values part from all existing ones. O(segments)."""
        trial = PlannedTrial(id, steps)
        trial.last = self.walk(trial, schedules, steps)
        return trial

    def walk(self, trial: PlannedTrial, schedules: Mapping[str, Schedule], steps: int) -> Node:
        """Return the last node on the path of a trial, adding nodes where its values part from all existing ones.
        O(segments)."""
        names = tuple(sorted(schedules))
        node: Node | None = None
        for step, stop, forms, first in pieces([schedules[name] for name in names], steps):
            constant = first is not None
            while step < stop:
                if node is not None:
                    if constant and node.curves is None:
                        if first == node.first:
                            break
                    elif (agreed := _agreement(forms, node.forms, step, stop)) > step:
                        step = agreed
                        continue
                if not constant:
                    first = tuple([distinct(form.value(step)) for form in forms])
                assert first is not None
                if node is None:
                    node = self._root(names, first, None if constant else tuple(forms), trial)
                else:
                    child = self._begun.get((node.id, step, first))
                    node = child or self._child(node, step, first, None if constant else tuple(forms), trial)
                if constant and node.curves is None:
                    break  # they agree to the end
        assert node is not None
        return node

    def _root(
        self, names: tuple[str, ...], first: tuple[object, ...], forms: tuple[Form, ...] | None, maker: PlannedTrial
    ) -> Node:
        salt = "" if self.sharing else maker.id
        root = self._begun.get((salt, names, first))
        if root is None:
            root = self._begun[salt, names, first] = Node(NodeId(len(self.nodes)), None, 0, names, first, forms, maker)
            root.begin(History.new(self.workload, names, salt=salt))
            self.nodes.append(root)
        return root

    def _child(
        self, parent: Node, step: int, first: tuple[object, ...], forms: tuple[Form, ...] | None, maker: PlannedTrial
    ) -> Node:
        # The names are the parent's own: equal ones of each trial would take as much memory again as the values.
        child = Node(NodeId(len(self.nodes)), parent, step, parent.names, first, forms, maker)
        self._begun[parent.id, step, first] = child
        self.nodes.append(child)
        parent.attach(child)
        others = self.partings.get(step, 0)
        if not others:
            self.milestones.add(step)
        self.partings[step] = others + 1
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
