"""The nodes of a plan and their states in columns. Pure.

These are the lines to edit when the fields of :class:`Node` or :class:`State` change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, islice, repeat
from operator import attrgetter, lt

import msgspec

from hpstage.plan.facts import Kept, NodeId, Part, StateKey, TrialId
from hpstage.plan.nodes import Node, PlannedTrial, State
from hpstage.plan.ordered import Ordered
from hpstage.plan.plan import SearchPlan
from hpstage.plan.snapshot.columns import Texts, check_lengths, check_numbers, pick, slices, some
from hpstage.schedule import Form, Scalar
from hpstage.schedule.scalars import distinct, plain


class NodeColumns(msgspec.Struct, array_like=True):
    """``parents``: numbers of nodes, -1 for roots. ``makers``: numbers of trials. ``names``: those of each root's
    hyperparameters, also those of the nodes below. ``values``: at the start of each node, in the order of the names,
    node after node. ``forms``: those of all nodes of which any varies; ``curves``: numbers of such nodes, and of their
    forms. ``keep_at``: numbers of nodes with steps, of the nodes that have any."""

    parents: list[int]
    starts: list[int]
    makers: list[int]
    names: list[tuple[str, ...]]
    values: list[Scalar]
    forms: list[Form]
    curves: list[tuple[int, list[int]]]
    trained: list[int]
    seconds: list[float]
    keep_at: list[tuple[int, list[int]]]


def columns_of_nodes(nodes: Sequence[Node], trials: Mapping[TrialId, int]) -> NodeColumns:
    varying = [(node.id, node.forms) for node in nodes if node.varying]
    forms = {id(form): form for _, some in varying for form in some}  # many nodes share one
    numbers = {id: number for number, id in enumerate(forms)}
    return NodeColumns(
        parents=[-1 if node.parent is None else node.parent.id for node in nodes],
        starts=[node.start for node in nodes],
        makers=[trials[node.maker.id] for node in nodes],
        names=[node.names for node in nodes if node.parent is None],
        values=[*map(plain, chain.from_iterable([node.first for node in nodes]))],
        forms=[*forms.values()],
        curves=[(node, [numbers[id(form)] for form in some]) for node, some in varying],
        trained=[node.trained for node in nodes],
        seconds=[node.seconds for node in nodes],
        keep_at=[(node.id, [*node.keep_at]) for node in nodes if node.keep_at],
    )


def fill_nodes(plan: SearchPlan, columns: NodeColumns, trials: Sequence[PlannedTrial]) -> None:
    """Add the nodes to an empty plan, as :class:`NodeTree` does one by one.

    Raises:
        ValueError, LookupError: the columns contradict each other.
    """
    tree, nodes = plan._tree, plan.nodes
    count = len(columns.parents)
    check_lengths(*(count, columns.starts, columns.makers, columns.trained, columns.seconds))
    if not all(map(lt, columns.parents, range(count))):
        raise ValueError("a node comes before its parent")
    roots, curves = iter(columns.names), {node: pick(columns.forms, forms) for node, forms in columns.curves}
    values = iter([value if value.__class__ is not bool else distinct(value) for value in columns.values])
    for number, (parent, start, maker, trained, seconds) in enumerate(
        zip(
            columns.parents,
            columns.starts,
            pick(trials, columns.makers),
            columns.trained,
            columns.seconds,
            strict=True,
        )
    ):
        above = nodes[parent] if parent >= 0 else None
        names = tree.roots(next(roots)).names if above is None else above.names
        first = tuple(islice(values, len(names)))
        forms = (*curves[number],) if number in curves else None
        node = Node(NodeId(number), above, start, names, first, forms, maker)
        node.trained, node.seconds = trained, seconds
        nodes.append(node)
        if above is None:
            tree.begin(node)
            continue
        if start <= above.start:
            raise ValueError("a node begins before its parent")
        if isinstance(above._children, list):
            above._children.append(node)  # sorted below
        else:
            above._children = [*above.children, node] if above._children else node
    siblings = 0
    begun = sum(map(len, tree._roots.values()))
    for node in nodes:
        if isinstance(node._children, list):
            node._children.sort(key=_start)
            siblings += len(node._children)
            for child in node._children:
                tree._siblings[node.id, child.start, child.first] = child
    if (
        len(tree._siblings) != siblings
        or (begun > len(columns.names) if tree.lacking else begun != len(columns.names))
        or sum([len(node.names) for node in nodes]) != len(columns.values)
    ):
        raise ValueError("nodes and their values do not fit")
    tree.branch_points |= Counter([node.start for node in nodes if node.parent is not None])
    tree.milestones += sorted(tree.branch_points)
    for node, steps in some(nodes, columns.keep_at):
        node.keep_at = Ordered(steps)


_start = attrgetter("start")


class StateColumns(msgspec.Struct, array_like=True):
    """``counts``: of the states of each node; the others are of states, node after node, in the order in which they
    came up. ``digests``, ``marks``: numbers of strings. ``metrics``: of each state that was evaluated the number of
    its metrics' names, else -1; ``values``: those of all. ``kept``: numbers of the states that are kept, in the order
    in which they came to be, for the columns after it. ``peak_bytes``, ``unanswered``: numbers of states with what
    they have, where they have any: trials by number."""

    counts: list[int]
    steps: list[int]
    used: list[float]
    bytes: list[int | None]
    digests: list[int]
    names: list[tuple[str, ...]]
    metrics: list[int]
    values: list[float]
    kept: list[int]
    keys: list[StateKey]
    kept_bytes: list[int]
    kept_digests: list[int]
    marks: list[int]
    parts: list[tuple[Part, ...]]
    rests: list[int | None]
    peak_bytes: list[tuple[int, int]]
    unanswered: list[tuple[int, list[int]]]


def columns_of_states(plan: SearchPlan, trials: Mapping[TrialId, int], texts: Texts) -> StateColumns:
    states = [state for node in plan.nodes for state in node.states.values()]
    names: dict[tuple[str, ...], int] = {}
    metrics = [-1 if state.metrics is None else names.setdefault((*state.metrics,), len(names)) for state in states]
    numbers = {state.kept.key: number for number, state in enumerate(states) if state.kept is not None}
    published = [state.kept for state in plan.kept.values() if state.kept is not None]
    return StateColumns(
        counts=[len(node.states) for node in plan.nodes],
        steps=[state.step for state in states],
        used=[state.used for state in states],
        bytes=[state.bytes for state in states],
        digests=[texts[state.digest] for state in states],
        names=[*names],
        metrics=metrics,
        values=[value for state in states if state.metrics is not None for value in state.metrics.values()],
        kept=[numbers[key] for key in plan.kept],
        keys=[one.key for one in published],
        kept_bytes=[one.bytes for one in published],
        kept_digests=[texts[one.digest] for one in published],
        marks=[texts[one.marks] for one in published],
        parts=[one.parts for one in published],
        rests=[one.rest for one in published],
        peak_bytes=[(n, state.peak_bytes) for n, state in enumerate(states) if state.peak_bytes is not None],
        unanswered=[
            (number, [trials[trial] for trial in state.unanswered])
            for number, state in enumerate(states)
            if state.unanswered is not None
        ],
    )


def fill_states(plan: SearchPlan, columns: StateColumns, ids: Sequence[TrialId], table: Sequence[str | None]) -> None:
    """Add the states to a plan that has the nodes.

    Args:
        ids: of the trials, by their numbers.
        table: the strings, and ``None`` at its end.

    Raises:
        ValueError, LookupError: the columns contradict each other.
    """
    count = len(columns.steps)
    check_lengths(len(plan.nodes), columns.counts)
    check_lengths(count, columns.used, columns.bytes, columns.digests, columns.metrics)
    states = [*map(State, chain.from_iterable(map(repeat, plan.nodes, columns.counts)), columns.steps)]
    for node, (first, last) in zip(plan.nodes, slices(columns.counts, count), strict=True):
        if last == first + 1:  # as most have
            node._states = states[first]
        elif last > first:
            node._states = dict(zip(columns.steps[first:last], states[first:last], strict=True))
            if len(node._states) != last - first:
                raise ValueError("a node has two states at one step")
    digests = pick(table, columns.digests, -1)
    for state, used, size, digest in zip(states, columns.used, columns.bytes, digests, strict=True):
        state.used, state.bytes, state.digest = used, size, digest
    _fill_metrics(states, columns)
    _fill_kept(plan, states, columns, table)
    for state, peak in some(states, columns.peak_bytes):
        state.peak_bytes = peak
    for state, trials in some(states, columns.unanswered):
        state.unanswered = pick(ids, trials)


def _fill_metrics(states: Sequence[State], columns: StateColumns) -> None:
    check_numbers([number + 1 for number in columns.metrics], len(columns.names) + 1)
    widths = [*map(len, columns.names), 0]  # those of -1 at the end
    if sum([widths[number] for number in columns.metrics]) != len(columns.values):
        raise ValueError("metrics and their values do not fit")
    values = iter(columns.values)
    for state, number in zip(states, columns.metrics, strict=True):
        if number >= 0:
            state.metrics = dict(zip(columns.names[number], values, strict=False))  # no more values than names


def _fill_kept(plan: SearchPlan, states: Sequence[State], columns: StateColumns, table: Sequence[str | None]) -> None:
    count = len(columns.kept)
    check_lengths(
        count, columns.keys, columns.kept_bytes, columns.kept_digests, columns.marks, columns.parts, columns.rests
    )
    digests, marks = pick(table, columns.kept_digests), pick(table, columns.marks)
    published = [*map(Kept, columns.keys, columns.kept_bytes, digests, marks, columns.parts, columns.rests)]
    kept = pick(states, columns.kept)
    for state, one in zip(kept, published, strict=True):
        state.kept = one
    plan.kept = dict(zip(columns.keys, kept, strict=True))
    plan.kept_bytes = sum(one.own for one in published)
    for one in published:
        plan.count_parts(one, 1)
    if not len(plan.kept) == len({*columns.kept}) == count:
        raise ValueError("two states are kept as one")
