"""The tree of a plan's nodes, and the paths of trials through it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from hpstage.plan.facts import NodeId, StateKey, TrialId
from hpstage.plan.keys import History
from hpstage.plan.nodes import Node, PlannedTrial, distinct
from hpstage.plan.ordered import Ordered
from hpstage.schedule import Schedule, agreement
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
        for start, stop, forms in pieces([schedules[name] for name in names], steps):
            step, fixed = start, _fixed(forms)
            while step < stop:
                if node is not None and fixed is not None and node.is_constant:
                    if fixed == node.first:
                        break
                elif node is not None:
                    agreed = _agreement(forms, node.forms, step, stop)
                    if agreed == stop:
                        break
                    if agreed > step:
                        step = agreed
                        continue
                first = tuple([distinct(form.value(step)) for form in forms]) if fixed is None else fixed
                varying = forms if fixed is None else None
                if node is None:
                    node = self._root(names, first, varying, trial)
                else:
                    node = self._child(node, step, first, varying, trial)
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
        key = parent.id, step, first
        child = self._begun.get(key)
        if child is None:
            # The names are the parent's own: equal ones of each trial would take as much memory again as the values.
            child = self._begun[key] = Node(NodeId(len(self.nodes)), parent, step, parent.names, first, forms, maker)
            self.nodes.append(child)
            parent.attach(child)
            others = self.partings.get(step, 0)
            if not others:
                self.milestones.add(step)
            self.partings[step] = others + 1
        return child


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
