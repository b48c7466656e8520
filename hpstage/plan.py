"""The search plan: the persistent tree of nodes, folded from the journal. Pure.

Trials are lines of training. Lines that see equal values from step 0 on are one line; where values part, a node
begins. The tree is a trie over the values at each step, compressed: a node holds one *form* per
hyper-parameter and is never split; children attach to it at any step. At one step of one node, children are told
apart by their values at that step, so that finding the way costs a look-up per segment and not per step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpstage.errors import InternalError, ScheduleError, UsageError
from hpstage.events import (
    ChainClosed,
    ChainId,
    ChainLost,
    ChainProlonged,
    ChainStarted,
    DriverId,
    DriverJoined,
    DriverLeft,
    Fact,
    Kept,
    NodeId,
    PlanCreated,
    SearchEnded,
    SearchStarted,
    StageFailed,
    StateKey,
    StateLost,
    StateReached,
    StateRef,
    Stretch,
    TargetAsked,
    TrialAdded,
    TrialEnded,
    TrialId,
    TrialProposed,
    WorkerId,
    to_numbers,
)
from hpstage.keys import History
from hpstage.ordered import Ordered
from hpstage.schedule import Form, Scalar, Schedule, agreement, varies

FORMAT = 2
"""Version of the journal's events. A plan of another format is refused, never guessed at."""

_TRUE, _FALSE = object(), object()  # stand for the booleans in look-ups: Python holds True == 1


def _distinct(value: Scalar) -> object:
    return value if value.__class__ is not bool else (_TRUE if value else _FALSE)


class State:
    """What is asked, known and kept of a node's line after ``step`` steps."""

    __slots__ = ("failed", "kept", "metrics", "node", "step", "used", "waiting")

    def __init__(self, node: Node, step: int) -> None:
        self.node = node
        self.step = step
        self.metrics: dict[str, float] | None = None
        self.kept: Kept | None = None
        self.used = 0.0  # when it was last kept or trained on from
        self.waiting: dict[TrialId, DriverId] = {}  # trials that ask for the metrics, in order of asking; for whom

    @property
    def ref(self) -> StateRef:
        return StateRef(self.node.id, self.step)


class Node:
    """Training from step ``start`` on under one set of forms, continuing ``parent``'s line."""

    __slots__ = (
        "_ahead",
        "_ahead_step",
        "_history",
        "children",
        "forms",
        "id",
        "names",
        "parent",
        "reach",
        "seconds",
        "start",
        "states",
        "trained",
        "varying",
    )

    def __init__(self, id: NodeId, parent: Node | None, start: int, names: tuple[str, ...], forms: tuple[Form, ...]):
        self.id = id
        self.parent = parent
        self.start = start
        self.names = names  # sorted
        self.forms = forms  # in the order of names
        self.varying = tuple(i for i, form in enumerate(forms) if varies(form))
        self.children: dict[int, dict[tuple[object, ...], Node]] = {}
        self.states: dict[int, State] = {}
        self.reach = start  # the farthest step that any trial asked for
        self.trained = 0  # steps trained, repetitions counted
        self.seconds = 0.0  # that this training took
        self._history: History | None = None  # up to and including the values at ``start``
        self._ahead: History | None = None  # the same, up to and including the values at ``_ahead_step - 1``
        self._ahead_step = start

    def values(self, step: int) -> tuple[Scalar, ...]:
        return tuple(form.value(step) for form in self.forms)

    def hyperparameters(self, step: int) -> dict[str, Scalar]:
        return dict(zip(self.names, self.values(step), strict=True))

    def ancestry(self) -> list[Node]:
        """This node's line from the root on, itself last."""
        line: list[Node] = []
        node: Node | None = self
        while node is not None:
            line.append(node)
            node = node.parent
        line.reverse()
        return line


@dataclass(slots=True)
class PlannedTrial:
    """A trial's way through the tree: node ``path[i]`` up to step ``stops[i]``."""

    id: TrialId
    steps: int
    path: tuple[Node, ...]
    stops: tuple[int, ...]
    schedules: Mapping[str, Schedule]
    targets: set[int] = field(default_factory=set)  # the steps asked for
    asked: int = 0  # the farthest of them
    fresh: dict[NodeId, int] = field(default_factory=dict)  # steps of each node that no trial had asked for before

    @property
    def shared(self) -> int:
        """Steps asked for that another trial had asked for before."""
        return self.asked - sum(self.fresh.values())

    def node_at(self, step: int) -> Node:
        """The node on whose line the state after ``step`` steps stands (1 <= step <= steps)."""
        return self.path[bisect_left(self.stops, step)]

    def legs(self, stop: int) -> Iterator[tuple[Node, int, int]]:
        """``(node, start, stop)`` along the way to step ``stop``."""
        start = 0
        for node, end in zip(self.path, self.stops, strict=True):
            if start >= stop:
                return
            yield node, start, min(end, stop)
            start = end


@dataclass(slots=True)
class OpenChain:
    """A chain that its driver runs: what it may train."""

    driver: DriverId
    worker: WorkerId
    stretches: list[Stretch]  # one on each node, in order
    reached: StateRef | None = None  # the last that it told of; by then it has loaded what it starts from

    def ahead(self) -> Iterator[Stretch]:
        """What it has still to pass, the farthest first."""
        for stretch in reversed(self.stretches):
            if self.reached is not None and stretch.node == self.reached.node:
                if self.reached.step < stretch.stop:
                    yield Stretch(stretch.node, max(stretch.start, self.reached.step), stretch.stop)
                if stretch.start <= self.reached.step:
                    return
            else:
                yield stretch

    def will_pass(self, ref: StateRef) -> bool:
        return any(stretch.node == ref.node and stretch.start < ref.step <= stretch.stop for stretch in self.ahead())

    def prolong(self, stretches: Iterable[Stretch]) -> None:
        for stretch in stretches:
            last = self.stretches[-1] if self.stretches else None
            if last is not None and last.node == stretch.node:
                self.stretches[-1] = Stretch(stretch.node, last.start, stretch.stop)
            else:
                self.stretches.append(stretch)


@dataclass(slots=True)
class SearchRecord:
    """A search as its study left it: what an interrupted call needs to go on."""

    started: SearchStarted
    before: Totals
    proposed: list[TrialProposed] = field(default_factory=list)
    open: dict[TrialId, None] = field(default_factory=dict)  # trials that are not over, in order
    ended: bool = False


@dataclass(slots=True)
class Totals:
    """Sums over all that happened: steps and seconds."""

    steps_asked: int = 0
    steps_unique: int = 0
    steps_trained: int = 0
    steps_wasted: int = 0
    train_seconds: float = 0.0
    load_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    save_seconds: float = 0.0
    wasted_seconds: float = 0.0
    evaluations: int = 0
    saves: int = 0
    loads: int = 0
    sources: dict[str, int] = field(default_factory=dict)

    @property
    def worker_seconds(self) -> float:
        return self.train_seconds + self.load_seconds + self.evaluate_seconds + self.save_seconds + self.wasted_seconds


@dataclass(slots=True)
class Merged:
    """Training that a set of trials asks for: each trial alone (``asked``), and all of them together (``unique``)."""

    steps_asked: int = 0
    steps_unique: int = 0
    seconds_asked: float = 0.0
    seconds_unique: float = 0.0

    @property
    def rate(self) -> float:
        return self.steps_asked / self.steps_unique if self.steps_unique else 1.0

    @property
    def cost_weighted_rate(self) -> float:
        """The merge rate with measured seconds in place of steps."""
        return self.seconds_asked / self.seconds_unique if self.seconds_unique else 1.0


class SearchPlan:
    """The fold of a journal. ``apply`` takes a fact; an illegal fact raises and changes nothing.

    ``sharing=False`` keeps every trial on a line of its own: what a search without a stage tree would train.
    """

    def __init__(self, workload: StateKey, *, sharing: bool = True) -> None:
        self.workload = workload
        self.sharing = sharing
        self.position = 0  # records of the journal that were folded
        self.nodes: list[Node] = []
        self.trials: dict[TrialId, PlannedTrial] = {}
        self.totals = Totals()
        self.failures: list[StageFailed] = []
        self._open: dict[DriverId, dict[tuple[TrialId, int], State]] = {}  # targets of each driver; answered ones too
        self.kept: dict[StateKey, State] = {}
        self.kept_bytes = 0
        self.ended: dict[TrialId, TrialEnded] = {}
        self.drivers: dict[DriverId, DriverJoined] = {}  # that have not left
        self.chains: dict[ChainId, OpenChain] = {}
        self.losses: dict[StateRef, list[ChainLost]] = {}  # workers that died in a row on the way from a state
        self.milestones: Ordered[int] = Ordered()  # the steps at which trials part somewhere
        self.partings: dict[int, int] = {}  # at each of them: how many nodes begin there
        self.searches: dict[str, SearchRecord] = {}  # the latest of each study
        self._roots: dict[tuple[object, ...], Node] = {}

    # --- folding ------------------------------------------------------------------------------------------

    def apply(self, fact: Fact) -> None:
        match fact:
            case StateReached():
                self._reached(fact)
            case TrialAdded():
                self._add(fact)
            case TargetAsked():
                self._ask(fact)
            case StateLost():
                self._node(fact.node)
                state = self.nodes[fact.node].states.get(fact.step)
                if state is None:
                    raise InternalError(f"state {fact.step} of node {fact.node} was lost but never kept")
                self._keep(state, None)  # two drivers may find the same checkpoint gone, and both say so
            case StageFailed():
                self._node(fact.node)
                self.failures.append(fact)
                self.losses.pop(StateRef(fact.node, fact.step), None)
                for state in self.beyond(fact):
                    state.waiting.clear()
            case ChainLost():
                self._node(fact.node)
                self.totals.steps_wasted += fact.steps
                self.totals.wasted_seconds += fact.seconds
                if fact.outcome in ("died", "lost"):
                    self.losses.setdefault(StateRef(fact.node, fact.step), []).append(fact)
            case ChainStarted():
                chain = OpenChain(fact.driver, fact.worker, list(fact.stretches))
                source = self.source_of(chain)
                if source is not None:
                    source.used = max(source.used, fact.at)
                self.chains[fact.chain] = chain
            case ChainProlonged():
                if fact.chain in self.chains:
                    self.chains[fact.chain].prolong(fact.stretches)
            case ChainClosed():
                self.chains.pop(fact.chain, None)
            case DriverJoined():
                self.drivers[fact.driver] = fact
            case DriverLeft():
                self.drivers.pop(fact.driver, None)
                self.forget(fact.driver)
            case SearchStarted():
                before = replace(self.totals, sources=dict(self.totals.sources))
                last = self._search(fact.study) if fact.extends else SearchRecord(fact, before)
                self.searches[fact.study] = record = SearchRecord(fact, before)
                if fact.extends:
                    record.proposed, record.open = list(last.proposed), dict(last.open)
            case TrialProposed():
                record = self._search(fact.study)
                record.proposed.append(fact)
                if fact.trial is not None:
                    record.open[fact.trial] = None
            case TrialEnded():
                self._search(fact.study).open.pop(fact.trial, None)
                self.ended[fact.trial] = fact
            case SearchEnded():
                record = self._search(fact.study)
                record.ended = True
                record.open.clear()
            case PlanCreated():
                if fact.format != FORMAT:
                    raise UsageError(other_format(fact.format))
                if fact.workload != self.workload:
                    raise InternalError("a journal of another workload was folded")

    def _search(self, study: str) -> SearchRecord:
        if study not in self.searches:
            raise InternalError(f"no search was started for study {study!r}")
        return self.searches[study]

    def _node(self, id: NodeId) -> Node:
        if not 0 <= id < len(self.nodes):
            raise InternalError(f"no node {id} in a plan of {len(self.nodes)}")
        return self.nodes[id]

    def _reached(self, fact: StateReached) -> None:
        node = self._node(fact.node)
        if not node.start <= fact.start <= fact.step or fact.step <= node.start:
            raise InternalError(f"steps {fact.start} to {fact.step} do not lie on node {fact.node}")
        state = self.touch(node, fact.step)
        steps = fact.step - fact.start
        self.losses.pop(StateRef(node.id, fact.start), None)
        node.trained += steps
        node.seconds += fact.train_seconds
        totals = self.totals
        totals.steps_trained += steps
        totals.train_seconds += fact.train_seconds
        totals.load_seconds += fact.load_seconds
        totals.evaluate_seconds += fact.evaluate_seconds
        totals.save_seconds += fact.save_seconds
        if fact.source is not None:
            totals.sources[fact.source] = totals.sources.get(fact.source, 0) + 1
            totals.loads += fact.source in ("live", "disk")
        if fact.metrics is not None:
            totals.evaluations += 1
            state.metrics = {**(state.metrics or {}), **to_numbers(fact.metrics)}
            state.waiting.clear()
        if fact.kept is not None:
            totals.saves += 1
            self._keep(state, fact.kept)
            state.used = max(state.used, fact.at)
        chain = None if fact.chain is None else self.chains.get(fact.chain)
        if chain is not None:
            chain.reached = state.ref

    def _keep(self, state: State, kept: Kept | None) -> None:
        if state.kept is not None:
            self.kept_bytes -= state.kept.bytes
            del self.kept[state.kept.key]
        if kept is not None:
            self.kept_bytes += kept.bytes
            self.kept[kept.key] = state
        state.kept = kept

    def _add(self, fact: TrialAdded) -> None:
        known = self.trials.get(fact.trial)
        if known is not None:
            if known.steps < fact.steps or dict(known.schedules) != dict(fact.schedules):
                self._extend(known, fact)
            return
        path, stops = self._walk(fact)
        self.trials[fact.trial] = PlannedTrial(fact.trial, fact.steps, path, stops, fact.schedules)

    def _extend(self, known: PlannedTrial, fact: TrialAdded) -> None:
        """The trial again, for more steps or other ones than it was asked for. What it was asked for stays as it is."""
        self.check(fact)
        known.path, known.stops = self._walk(fact)
        known.steps, known.schedules = fact.steps, fact.schedules

    def check(self, fact: TrialAdded) -> None:
        """Refuse a trial that was trained under other schedules before.

        Raises:
            UsageError: naming the trial and the hyper-parameter.
        """
        known = self.trials.get(fact.trial)
        if known is None or not known.asked:
            return
        if fact.steps < known.asked or fact.schedules.keys() != known.schedules.keys():
            raise UsageError(
                f"trial {fact.trial} was trained to step {known.asked} with {', '.join(sorted(known.schedules))}; it "
                f"cannot become one of {fact.steps} steps with {', '.join(sorted(fact.schedules))}"
            )
        for name, schedule in sorted(fact.schedules.items()):
            if schedule.until(known.asked) != known.schedules[name].until(known.asked):
                raise UsageError(
                    f"trial {fact.trial} was trained to step {known.asked} under another schedule of {name!r}; a "
                    f"trial's past is fixed: keep the space's schedules as they were up to there"
                )

    def _walk(self, fact: TrialAdded) -> tuple[tuple[Node, ...], tuple[int, ...]]:
        """The trial's way, with nodes made where its values part from all that is there. O(segments)."""
        names = tuple(sorted(fact.schedules))
        salt = "" if self.sharing else fact.trial
        node: Node | None = None
        path: list[Node] = []
        stops: list[int] = []
        for start, stop, forms in pieces([fact.schedules[name] for name in names], fact.steps):
            step = start
            while step < stop:
                if node is not None:
                    agreed = stop
                    for mine, theirs in zip(forms, node.forms, strict=True):
                        if mine is not theirs:
                            agreed = agreement(theirs, mine, step, agreed)
                            if agreed == step:
                                break
                    if agreed > step:
                        step = agreed
                        continue
                values = tuple([_distinct(form.value(step)) for form in forms])
                if node is None:
                    siblings, values = self._roots, (salt, names, values)
                else:
                    path.append(node)
                    stops.append(step)
                    siblings = node.children.setdefault(step, {})
                child = siblings.get(values)
                if child is None:
                    child = Node(NodeId(len(self.nodes)), node, step, names, forms)
                    if node is None:
                        child._history = History(self.workload, names, salt=salt)
                        child._history.change(0, zip(names, child.values(0), strict=True))
                    else:
                        self.milestones.add(step)
                        self.partings[step] = self.partings.get(step, 0) + 1
                    self.nodes.append(child)
                    siblings[values] = child
                node = child
        assert node is not None
        path.append(node)
        stops.append(fact.steps)
        return tuple(path), tuple(stops)

    def forget(self, driver: DriverId) -> None:
        """The driver is gone, and with it its chains and what it waits for."""
        self.chains = {id: chain for id, chain in self.chains.items() if chain.driver != driver}
        for (trial, _), state in self._open.pop(driver, {}).items():
            if state.waiting.get(trial) == driver:
                del state.waiting[trial]

    def wanted_by(self, driver: DriverId) -> list[State]:
        """States that the driver waits for."""
        open = self._open.get(driver, {})
        return list({id(s): s for (trial, _), s in open.items() if s.waiting.get(trial) == driver}.values())

    def wanted(self) -> Iterator[State]:
        """States that any driver waits for. O(those), amortised: what was answered is looked at once."""
        for driver, open in self._open.items():
            for target in [target for target, state in open.items() if state.waiting.get(target[0]) != driver]:
                del open[target]
            yield from open.values()

    def open_trials(self) -> Iterator[PlannedTrial]:
        """Trials that are not over: an algorithm may train them on. Those of a search that ended, or that another has
        replaced, are."""
        for record in self.searches.values():
            for trial in record.open:
                if trial in self.trials:
                    yield self.trials[trial]

    def studies(self) -> set[str]:
        """Identities of the studies that have searched on the plan."""
        return {record.started.identity for record in self.searches.values()}

    def source_of(self, chain: OpenChain) -> State | None:
        """The state that a chain starts from; ``None``: the beginning of training."""
        first = chain.stretches[0]
        node = self._node(first.node)
        if first.start > node.start:
            return node.states.get(first.start)
        return None if node.parent is None else node.parent.states.get(first.start)

    def will_keep(self, ref: StateRef) -> bool:
        """Is a chain under way to this state, so that it may keep it (again)?"""
        return any(chain.will_pass(ref) for chain in self.chains.values())

    def beyond(self, failed: StageFailed) -> Iterator[State]:
        """The states that a failure puts out of reach; those of the evaluation that failed, if it was one."""
        node = self.nodes[failed.node]
        if failed.evaluating:
            state = node.states.get(failed.step)
            if state is not None:
                yield state
            return
        below = [(node, failed.step)]
        while below:
            line, step = below.pop()
            for at in sorted(line.states):
                if at > step:
                    yield line.states[at]
            for at, children in line.children.items():
                if at > step:
                    below += [(child, child.start) for child in children.values()]

    # --- asking -------------------------------------------------------------------------------------------

    def touch(self, node: Node, step: int) -> State:
        """The state at ``step`` of ``node``, made if it was not yet spoken of."""
        state = node.states.get(step)
        if state is None:
            state = node.states[step] = State(node, step)
        return state

    def target(self, trial: TrialId, step: int) -> State:
        """The state that is ``trial`` trained to ``step``. O(log segments)."""
        planned = self.trials.get(trial)
        if planned is None:
            raise InternalError(f"trial {trial} was asked for but never added")
        if not 1 <= step <= planned.steps:
            raise InternalError(f"step {step} was asked of trial {trial}, which ends at {planned.steps}")
        return self.touch(planned.node_at(step), step)

    def _ask(self, fact: TargetAsked) -> None:
        """Account for a target. Whoever asks first for a step of a node pays for it. O(segments)."""
        state = self.target(fact.trial, fact.step)
        if state.metrics is None:
            state.waiting[fact.trial] = fact.driver
            self._open.setdefault(fact.driver, {})[fact.trial, fact.step] = state
        planned, step = self.trials[fact.trial], fact.step
        planned.targets.add(step)
        if step <= planned.asked:
            return
        self.totals.steps_asked += step - planned.asked
        planned.asked = step
        for node, _, stop in planned.legs(step):
            if stop > node.reach:
                fresh = stop - node.reach
                planned.fresh[node.id] = planned.fresh.get(node.id, 0) + fresh
                self.totals.steps_unique += fresh
                node.reach = stop

    # --- reading ------------------------------------------------------------------------------------------

    @property
    def steps_asked(self) -> int:
        """Steps of all trials, as far as asked."""
        return self.totals.steps_asked

    @property
    def steps_unique(self) -> int:
        """Distinct steps among them."""
        return self.totals.steps_unique

    @property
    def merge_rate(self) -> float:
        """Steps of all trials / unique steps, as far as asked (arXiv 2006.11972, section 2)."""
        return self.steps_asked / self.steps_unique if self.steps_unique else 1.0

    def merged(self, trials: Iterable[PlannedTrial]) -> Merged:
        """What these trials ask for, each alone and all together. O(their segments)."""
        merged = Merged()
        reach: dict[NodeId, int] = {}
        for trial in trials:
            for node, start, stop in trial.legs(trial.asked):
                cost = self.step_seconds(node)
                merged.steps_asked += stop - start
                merged.seconds_asked += (stop - start) * cost
                fresh = stop - reach.get(node.id, start)
                if fresh > 0:
                    reach[node.id] = stop
                    merged.steps_unique += fresh
                    merged.seconds_unique += fresh * cost
        return merged

    def shared_seconds(self, trial: PlannedTrial) -> float:
        """Estimated seconds of the steps that another trial had asked for before this one."""
        return sum(
            (stop - start - trial.fresh.get(node.id, 0)) * self.step_seconds(node)
            for node, start, stop in trial.legs(trial.asked)
        )

    def step_seconds(self, node: Node) -> float:
        """Seconds per step: the node's own where it ran, else its nearest measured ancestor's, else the average."""
        walk: Node | None = node
        while walk is not None:
            if walk.trained:
                return walk.seconds / walk.trained
            walk = walk.parent
        return self.average_step_seconds()

    def average_step_seconds(self) -> float:
        """Seconds per step over the whole workload; 1.0 until something ran."""
        totals = self.totals
        return totals.train_seconds / totals.steps_trained if totals.steps_trained else 1.0

    def key(self, node: Node, step: int) -> StateKey:
        """The key of a state. O(1) for constant forms, else amortised O(steps) per node."""
        return self._seen(node, step).key(step)

    def _seen(self, node: Node, step: int) -> History:
        """The values seen before ``step`` on ``node``'s line."""
        history = node._history
        if history is None:
            assert node.parent is not None
            history = self._seen(node.parent, node.start).copy()
            before = node.parent.values(node.start - 1)
            changed = [
                (name, now)
                for name, now, then in zip(node.names, node.values(node.start), before, strict=True)
                if _distinct(now) != _distinct(then)
            ]
            if changed:
                history.change(node.start, changed)
            node._history = history
        if not node.varying or step <= node.start + 1:
            return history
        if node._ahead is None or node._ahead_step > step:
            node._ahead, node._ahead_step = history.copy(), node.start + 1
        ahead = node._ahead
        past = node.values(node._ahead_step - 1)
        last = {i: _distinct(past[i]) for i in node.varying}
        for at in range(node._ahead_step, step):
            changed = []
            for i in node.varying:
                now = node.forms[i].value(at)
                if _distinct(now) != last[i]:
                    changed.append((node.names[i], now))
                    last[i] = _distinct(now)
            if changed:
                ahead.change(at, changed)
        node._ahead_step = step
        return ahead

    def validate(self) -> None:
        """Assert every invariant of the tree. For tests and for hunting bugs: O(plan)."""
        for index, node in enumerate(self.nodes):
            assert node.id == index
            assert len(node.names) == len(node.forms) and list(node.names) == sorted(node.names)
            if node.parent is not None:
                assert node.parent.id < node.id and node.parent.start < node.start, "children come after, and later"
                assert node.parent.names == node.names
            for step, siblings in node.children.items():
                assert step > node.start
                own = tuple(_distinct(value) for value in node.values(step))
                for values, child in siblings.items():
                    assert child.parent is node and child.start == step
                    assert tuple(_distinct(v) for v in child.values(step)) == values != own, "a child parts at once"
            for step, state in node.states.items():
                assert state.step == step > node.start and state.node is node
                if state.kept is not None:
                    assert state.kept.key == self.key(node, step)
                    assert self.kept[state.kept.key] is state
        assert all(state.kept is not None and state.kept.key == key for key, state in self.kept.items())
        assert self.kept_bytes == sum(state.kept.bytes for state in self.kept.values() if state.kept is not None)
        unique: dict[int, int] = {}
        for trial in self.trials.values():
            assert trial.stops[-1] == trial.steps and list(trial.stops) == sorted(set(trial.stops))
            for node, start, stop in trial.legs(trial.asked):
                assert node.start == start < stop
                unique[node.id] = max(unique.get(node.id, 0), stop - start)
            fresh = trial.fresh.values()
            assert trial.asked == max(trial.targets, default=0) and all(steps > 0 for steps in fresh)
        assert self.steps_unique == sum(sum(trial.fresh.values()) for trial in self.trials.values())
        assert self.steps_asked == sum(trial.asked for trial in self.trials.values())
        assert self.steps_unique == sum(unique.values()) == sum(node.reach - node.start for node in self.nodes)


def other_format(format: int) -> str:
    age, remedy = ("a newer", "upgrade hpstage") if format > FORMAT else ("an older", "go on with that one")
    return (
        f"this store was written in format {format} by {age} hpstage; this one reads format {FORMAT}: {remedy}, or "
        f"choose another store"
    )


def pieces(schedules: Sequence[Schedule], steps: int) -> Iterator[tuple[int, int, tuple[Form, ...]]]:
    """``(start, stop, forms)`` for each stretch of ``[0, steps)`` on which no schedule changes its form."""
    columns = [list(schedule.pieces()) for schedule in schedules]
    at = [0] * len(columns)
    start = 0
    while start < steps:
        stop = steps
        for column, i in zip(columns, at, strict=True):
            end = column[i][1]
            if end is not None and end < stop:
                stop = end
        yield start, stop, tuple([column[i][2] for column, i in zip(columns, at, strict=True)])
        for j, (column, i) in enumerate(zip(columns, at, strict=True)):
            if column[i][1] == stop:
                at[j] = i + 1
        start = stop


def check_trial(schedules: Mapping[str, Schedule], steps: int, trial: str) -> None:
    """Refuse schedules that do not reach the trial's end, or that end apart.

    Raises:
        ScheduleError: naming the hyper-parameter and the remedy.
    """
    if not schedules:
        raise ScheduleError(f"{trial}: there are no hyper-parameters; the space must return at least one")
    lengths = {name: schedule.length for name, schedule in schedules.items() if schedule.length is not None}
    for name, length in sorted(lengths.items()):
        if length < steps:
            raise ScheduleError(
                f"{trial}: the schedule of {name!r} ends at step {length}, but the trial has {steps} steps; add "
                f".then(...) or train fewer steps"
            )
    if len(set(lengths.values())) > 1:
        ends = ", ".join(f"{name!r} at {length}" for name, length in sorted(lengths.items()))
        raise ScheduleError(f"{trial}: schedules end at different steps ({ends}); bound them with .until({steps})")
