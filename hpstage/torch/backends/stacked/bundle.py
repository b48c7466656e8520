"""Bundle: members, each a model with its optimizer, that are trained as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpstage.errors import UsageError
from hpstage.plan.facts import NO_FROZEN_WORK, FrozenWork
from hpstage.schedule import Scalar
from hpstage.torch.backends.backend import NeedsPython, NotStackable
from hpstage.torch.backends.stacked.building import Builder
from hpstage.torch.backends.stacked.frozen import Common
from hpstage.torch.backends.stacked.optimizers import FlatGroup, Rows, formula_of
from hpstage.torch.backends.stacked.outputs import Ahead
from hpstage.torch.backends.stacked.planning import STREAM
from hpstage.torch.backends.stacked.prefix import Divided, Prefix
from hpstage.torch.backends.stacked.program import Program
from hpstage.torch.backends.stacked.signature import shape_key, tensors_of
from hpstage.torch.backends.stacked.streams import Streams, generator_of
from hpstage.torch.backends.stacked.tracing import Trace


class Member:
    """A model with its optimizer. A bundle trains copies of their tensors, and writes these back by
    :meth:`Bundle.sync`.

    Args:
        trace: the trace of its next step, if known.

    Raises:
        NeedsPython: there is no stacked form of the optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, trace: Trace | None = None) -> None:
        self.model, self.optimizer = model, optimizer
        self.parameters = dict(model.named_parameters())
        self.formulas = [formula_of(optimizer, group) for group in optimizer.param_groups]
        self._form: list[object] = [(name, tensor.shape, tensor.dtype) for name, tensor in self.tensors().items()]
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._form += [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
        self.frozen: dict[str, Tensor] = {}
        """Copies of the tensors that steps do not change, by name. Other members may share them; the model has the same
        values."""
        self.taken = 0
        """Number of steps since the member joined."""
        self.trace: Trace | None = trace
        """The trace of its step on batches of the last shape."""
        self._steps: dict[int, int] = {}
        """Number of steps of each param group, as the optimizer's state counts them."""
        device = next(iter(self.parameters.values())).device
        self.stream: Tensor = generator_of(device).get_state()
        """The state of torch's generator from which the next step draws. Set it before each step."""

    def steps_like(self, other: Member) -> bool:
        """Return whether the optimizer of ``other`` has the same formulas, and its tensors the same form."""
        return self.formulas == other.formulas and self._form == other._form

    def fits(self) -> bool:
        """Return whether the optimizer still steps by the formulas with which the member joined."""
        groups = self.optimizer.param_groups
        return all(formula.fits(group) for formula, group in zip(self.formulas, groups, strict=True))

    def numbers(self, index: int) -> list[float]:
        return list(self.formulas[index].numbers(self.optimizer.param_groups[index], self._steps[index]))

    def count_step(self) -> None:
        self.taken += 1
        for index in self._steps:
            self._steps[index] += 1

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name."""
        return self.parameters | dict(self.model.named_buffers())

    def state(self, index: int, names: Sequence[str]) -> list[list[Tensor] | None]:
        """Return the optimizer's tensors for the trained parameters of a group, one list for each name in
        ``Formula.state``; None before the first step."""
        formula = self.formulas[index]
        states = [self.optimizer.state.get(self.parameters[name], {}) for name in names]
        found = set()
        for known in states:
            there = bool(formula.state) and all(isinstance(known.get(what), Tensor) for what in formula.state)
            found.add(int(known["step"]) if there and formula.counts else int(there))
        if len(found) > 1:
            raise NotStackable(f"the parameters of param group {index} have taken different numbers of steps")
        (self._steps[index],) = found
        return [[known[what] for known in states] if self._steps[index] else None for what in formula.state]

    def write(
        self, index: int, names: Sequence[str], weights: Sequence[Tensor], state: Sequence[Sequence[Tensor]]
    ) -> None:
        """Write a group's parameters and the optimizer's state for them."""
        formula = self.formulas[index]
        with torch.no_grad():
            for position, name in enumerate(names):
                parameter = self.parameters[name]
                parameter.copy_(weights[position])
                parameter.grad = None
                known = self.optimizer.state[parameter] if formula.state else {}
                if formula.counts:
                    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
                    known.setdefault("step", torch.zeros((), dtype=dtype)).fill_(float(self._steps[index]))
                for what, tensors in zip(formula.state, state, strict=True):
                    if isinstance(known.get(what), Tensor):
                        known[what].copy_(tensors[position])
                    else:
                        known[what] = tensors[position].clone(memory_format=torch.contiguous_format)

    def write_kept(self, tensors: Mapping[str, Tensor]) -> None:
        """Write buffers, and parameters that are not trained."""
        own = self.tensors()
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)


class Bundle:
    """Members that are trained as one. A member's bits depend only on the member itself: not on the number of members,
    its slot or the other members. A bundle of one member is the reference.

    Args:
        builder: makes the programs of one trainable; bundles of the same trainable may share it.
        trace: the trace of its first step, if known.
    """

    def __init__(self, builder: Builder, trace: Trace | None = None) -> None:
        self._builder, self._first = builder, trace
        self.members: list[Member] = []
        """The members in the order of their slots. A new member takes the last slot; if one leaves, later ones move
        up."""
        self._trace: Trace | None = None
        self._groups: dict[int, FlatGroup] = {}  # by the index of the param group
        self._kept: list[list[Tensor]] = []
        self._prepared: object = None
        self._common: Common | None = None
        self._numbers: dict[int, tuple[list[list[float]], Tensor]] = {}
        self.logged: list[tuple[str, list[float]]] = []
        """The logs of the last step: names, and each member's values."""
        self.frozen_work: list[FrozenWork] = []
        """Each member's work on frozen layers in the last step."""
        self.widths: list[int] = []
        """For each member, the number of members with which it was stacked in the last step, itself included."""

    def join(self, model: nn.Module, optimizer: torch.optim.Optimizer, trace: Trace | None = None) -> Member:
        """Add a member in a new last slot. Until it leaves, its model and its optimizer are not up to date.

        Args:
            trace: the trace of its next step, if known.

        Raises:
            NotStackable: there is no stacked form of its optimizer, or the member differs in kind from the others.
        """
        member = Member(model, optimizer, trace)
        if self.members and not member.steps_like(self.members[0]):
            raise NotStackable(
                "the members' models differ, or their optimizers differ in more than the values of hyperparameters"
            )
        if self._trace is not None:
            self._enter(member)
        self.members.append(member)
        self._common = None
        return member

    def leave(self, member: Member) -> None:
        """Write a member's state into its model and its optimizer, and continue without it. If memory runs out, nothing
        is changed."""
        slot = self.members.index(member)
        self.sync(member)
        self._take([(group, group.without(slot)) for group in self._groups.values()])
        self.members.remove(member)
        self._common = None
        self._kept = [[part for index, part in enumerate(value) if index != slot] for value in self._kept]
        if not self.members:
            self._trace = None

    @property
    def trace(self) -> Trace | None:
        """The trace of the bundle's last step; before the first step, the trace that was given for it, if any."""
        return self._first if self._trace is None else self._trace

    def give_up(self) -> None:
        """Drop all members and their state, which may be the result of a partial step."""
        self.members.clear()
        self._trace = self._common = None
        self._groups, self._kept = {}, []

    def sync(self, member: Member) -> None:
        """Write a member's state into its model and its optimizer."""
        if self._trace is None or not member.taken:
            return
        slot = self.members.index(member)
        for index, group in self._groups.items():
            state = [group.of(slot, tensor) for tensor in group.state]
            member.write(index, [place.name for place in group.places], group.of(slot, group.weight), state)
        kept = zip(self._trace.kept, (value[slot] for value in self._kept), strict=True)
        member.write_kept({name: tensor for name, tensor in kept if tensor is not member.frozen.get(name)})

    def step(
        self, batches: Sequence[Any], hp: Sequence[Mapping[str, Scalar]], most: int | None = None
    ) -> Tensor | None:
        """Train each member on its batch, with the values that its optimizer's param groups have now, and its values of
        the hyperparameters that ``update()`` reads. Random numbers are drawn from :attr:`Member.stream`.

        Args:
            batches: one for each member, with equal :func:`shape_key`.
            hp: all hyperparameters of each member at this step.
            most: maximum number of members trained as one. Fewer are if a larger program is not worth building.
                ``None``: all of them.

        Returns:
            The losses, of shape (members,), or None if ``update()`` returns none.

        Raises:
            NotStackable: these members do not take the same step. Nothing has been trained.
            NeedsPython: a member's step cannot be recorded at all.
            torch.OutOfMemoryError: the members' state is lost: part of it may have been trained.
        """
        if len(batches) != len(self.members) or len(hp) != len(self.members):
            raise UsageError(
                f"there are {len(self.members)} members, but {len(batches)} batches and {len(hp)} sets of values"
            )
        shape, *others = map(shape_key, batches)
        if any(other != shape for other in others):
            raise NotStackable("the members' batches differ in shape at this step")
        columns = [list(column) for column in zip(*map(tensors_of, batches), strict=True)]
        trace = self._ready(shape, batches, hp)
        divided = self._builder.divided(trace)
        example = [column[0] for column in columns]
        ahead = self._ahead(divided.prefix, columns)
        columns += [list(column) for column in zip(*(its.values for its in ahead), strict=True)]
        programs = self._programs_for(divided, columns, example, hp, most)
        values = [self._column([of[name] for of in hp]) for name in trace.values]
        self.widths = [program.width for program in programs for _ in range(program.width)]
        done: list[_Done] = []
        with torch.inference_mode():
            for program in programs:
                first = sum(of.program.width for of in done)
                done.append(self._run(divided, program, slice(first, first + program.width), values, columns))
            numbers = {index: self._numbers_of(index) for index in self._groups}
            for of in done:  # only now, since none of the programs can fail any more
                self._take_step(of, numbers)
        losses, self._kept, logged = _joined(done)
        work = [FrozenWork(1, int(its.found), its.seconds if its.found else 0.0) for its in ahead]
        self.frozen_work = work or [NO_FROZEN_WORK] * len(self.members)
        values_logged = iter(logged)
        self.logged = [
            (name, next(values_logged).tolist() if number is None else [number] * len(self.members))
            for name, number in trace.logged
        ]
        return None if losses is None else losses.clone()

    def _run(
        self, step: Divided, program: Program, slots: slice, values: Sequence[Tensor], columns: Sequence[list[Tensor]]
    ) -> _Done:
        """Run a program for the members in these slots."""
        whole = program.width == len(self.members)
        kept = self._kept if whole else [value[slots] for value in self._kept]
        inputs: list[Any] = [weight for group in self._groups.values() for weight in group.stacked(slots)]
        inputs += kept
        inputs += values if whole else [value[slots].clone() for value in values]  # copied, to be aligned
        inputs += columns if whole else [column[slots] for column in columns]
        for index in program.shared - {STREAM}:
            inputs[index] = inputs[index][0]
        members = self.members[slots]
        streams = Streams(self._builder.device, [member.stream for member in members])
        began = self._builder.clock()
        losses, gradients, after, logged = program.run(inputs, streams)
        self._builder.worth(step).took((program.width, program.shared), self._builder.clock() - began)
        return _Done(program, slots, losses, gradients, after, logged, streams)

    def _take_step(self, done: _Done, numbers: Mapping[int, Tensor]) -> None:
        first, slots = 0, done.slots
        for index, group in self._groups.items():
            group.step(done.gradients[first : first + len(group.places)], numbers[index][slots], slots)
            first += len(group.places)
        for member, state in zip(self.members[slots], done.streams.states, strict=True):
            member.stream = state
            member.count_step()

    def _ahead(self, prefix: Prefix | None, columns: Sequence[Sequence[Tensor]]) -> list[Ahead]:
        """Return the results of the step's prefix on each member's batch."""
        if prefix is None:
            return []
        frozen = [[member.frozen[name] for name in prefix.frozen] for member in self.members]
        batches = [[columns[index][slot] for index in prefix.batch] for slot in range(len(self.members))]
        with torch.inference_mode():
            return self._builder.outputs.of(prefix, frozen, batches)

    def _ready(self, shape: object, batches: Sequence[Any], hp: Sequence[Mapping[str, Scalar]]) -> Trace:
        """Return the trace for these batches: the previous one, as long as only numbers change."""
        if not all(member.fits() for member in self.members):
            raise NotStackable("momentum or weight decay has become zero or nonzero: leave, and join again")
        if self._trace is not None:
            self._trace.check_constants()
        if self._prepared != shape:
            if self._prepared is not None:
                for member in self.members:
                    member.trace = None
            self._prepared, self._common = shape, None
        known = self._trace
        if self._common is not None and known is not None and all(map(known.fits, hp)):
            return known
        tracer = self._builder.tracer
        traces = []
        for member, batch, of in zip(self.members, batches, hp, strict=True):
            # A member keeps its trace as long as only numbers change, whoever joins or leaves.
            if member.trace is None or not member.trace.fits(of):
                try:
                    member.trace = tracer.trace(member.model, member.optimizer, batch, of)
                except NeedsPython as error:
                    error.member = member
                    raise
            traces.append(member.trace)
        trace, *others = traces
        if any(other is not trace for other in others):
            raise NotStackable("the members' steps differ, since their models or non-float hyperparameters differ")
        if self._trace is None:
            self._allocate(trace)
        elif (self._trace.trained, self._trace.kept) != (trace.trained, trace.kept):
            raise NotStackable("with batches of another shape, other parameters are trained")
        self._trace = trace
        self._freeze(trace)
        self._common = Common(self._builder.divided(trace).rest, self._kept, len(self.members))
        return trace

    def _freeze(self, trace: Trace) -> None:
        """Replace the tensors that steps no longer change by copies that members may share. Earlier steps may have
        changed them."""
        for index, name in enumerate(trace.kept):
            if name not in trace.unchanged:
                for member in self.members:
                    member.frozen.pop(name, None)
                continue
            for member, part in zip(self.members, self._kept[index], strict=True):
                if name not in member.frozen:
                    member.write_kept({name: part})  # sync() leaves out frozen tensors
                    member.frozen[name] = self._builder.frozen.copy_of(name, part)
            self._kept[index] = [member.frozen[name] for member in self.members]

    def _programs_for(
        self,
        step: Divided,
        columns: Sequence[Sequence[Tensor]],
        batch: Sequence[Tensor],
        hp: Sequence[Mapping[str, Scalar]],
        most: int | None,
    ) -> list[Program]:
        """Return the programs for the inputs that members have in common in this step.

        Args:
            columns: for each tensor of the batch, and then for each result of the prefix, those of all members.
            batch: the first member's batch.
        """
        common = self._common
        assert common is not None
        shared = common.of(columns, [member.stream for member in self.members])

        def example() -> list[Tensor]:
            return [
                *(weight[0] for group in self._groups.values() for weight in group.stacked()),
                *(value[0] for value in self._kept),
                *(self._column([hp[0][name]])[0] for name in step.rest.values),
                *batch,
            ]

        return self._builder.programs(step, (len(self.members), shared), example, most)

    def _allocate(self, trace: Trace) -> None:
        first = self.members[0]
        groups = {}
        for index in sorted(set(trace.groups)):
            names = [name for name, group in zip(trace.trained, trace.groups, strict=True) if group == index]
            groups[index] = FlatGroup(first.formulas[index], [(name, first.parameters[name]) for name in names])
        self._groups = groups
        self._kept = [[] for _ in trace.kept]
        self._trace = trace
        for member in self.members:
            self._enter(member)

    def _enter(self, member: Member) -> None:
        """Copy a member's tensors into a new last slot. If memory runs out, nothing is changed."""
        assert self._trace is not None
        rows = []
        for index, group in self._groups.items():
            names = [place.name for place in group.places]
            weights = [member.parameters[name] for name in names]
            rows.append((group, group.with_row(weights, member.state(index, names))))
        own = member.tensors()
        kept = []
        for name in self._trace.kept:
            if name in self._trace.unchanged:
                kept.append(self._builder.frozen.copy_of(name, own[name]))
                member.frozen[name] = kept[-1]
            else:
                kept.append(own[name].detach().clone(memory_format=torch.contiguous_format))
        self._take(rows)
        self._kept = [[*value, new] for value, new in zip(self._kept, kept, strict=True)]

    def _take(self, rows: Sequence[tuple[FlatGroup, Rows]]) -> None:
        for group, its in rows:
            group.take(its)

    def _numbers_of(self, index: int) -> Tensor:
        """Return the numbers of a param group's step, of shape (members, numbers)."""
        now = [member.numbers(index) for member in self.members]
        before = self._numbers.get(index)
        if before is None or before[0] != now:
            self._numbers[index] = before = (now, torch.tensor(now, dtype=torch.float64, device=self._builder.device))
        return before[1]

    def _column(self, values: Sequence[Any]) -> Tensor:
        dtype = next(iter(self._groups.values())).weight.dtype
        return torch.tensor([float(value) for value in values], dtype=dtype, device=self._builder.device)


@dataclass(frozen=True)
class _Done:
    """The results of a program for the members in some slots."""

    program: Program
    slots: slice
    losses: Tensor | None
    gradients: list[Tensor]
    kept: list[list[Tensor]]
    logged: list[Tensor]
    streams: Streams


def _joined(parts: Sequence[_Done]) -> tuple[Tensor | None, list[list[Tensor]], list[Tensor]]:
    """Return the losses of all members, their kept values, and their logged values."""
    if len(parts) == 1:
        return parts[0].losses, parts[0].kept, parts[0].logged
    losses = [part.losses for part in parts if part.losses is not None]
    kept = zip(*(part.kept for part in parts), strict=True)
    logged = zip(*(part.logged for part in parts), strict=True)
    return (
        torch.cat(losses) if losses else None,
        [[member for value in values for member in value] for values in kept],
        [torch.cat(values) for values in logged],
    )
