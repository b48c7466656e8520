"""Builder: builds the program of a step for a number of members, and checks it before it is used."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from hpstage.torch.backends.backend import NotStackable
from hpstage.torch.backends.stacked.frozen import Frozen
from hpstage.torch.backends.stacked.outputs import Outputs
from hpstage.torch.backends.stacked.planning import STREAM, Tried, is_heavy, once_of, plan, same
from hpstage.torch.backends.stacked.prefix import Divided, divide
from hpstage.torch.backends.stacked.program import Program, Value, program
from hpstage.torch.backends.stacked.rules import is_large
from hpstage.torch.backends.stacked.streams import Streams
from hpstage.torch.backends.stacked.tracing import Effects, Trace, Tracer, probe
from hpstage.torch.backends.stacked.worth import ALONE, Form, Worth
from hpstage.torch.trainable import TorchTrainable

logger = logging.getLogger("hpstage")

_SEEN = 4096
_SEEDS = (1, 2)  # of the made-up members to plan a program with, and to check it with


class Builder:
    """Builds the programs of one trainable on one device. Each shape of batches has one trace; the rest of the trace,
    without its prefix, has one program for each number of members.

    Args:
        subject: the trainable whose ``update()`` is trained.
        effects: see :class:`hpstage.torch.backends.stacked.tracing.Tracer`.
    """

    def __init__(self, subject: TorchTrainable, device: torch.device, effects: Effects | None = None) -> None:
        self.device = device
        self.tracer = Tracer(subject, effects)
        self.frozen = Frozen()
        self.outputs = Outputs()
        self.divided: Callable[[Trace], Divided] = cache(divide)
        """Divides a step into its prefix and the rest."""
        self.worth: Callable[[Divided], Worth] = cache(lambda step: Worth(partial(_in_common, step.rest)))
        """Returns the known seconds of the programs of the rest of a step."""
        self._programs: dict[tuple[Divided, int, frozenset[int]], Program] = {}
        self._tried = Tried()
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self.clock = time.thread_time if alone else time.perf_counter
        self.worthwhile = 1
        """The largest number of members for which there is a program, or for which building one would pay."""
        self.built = 0
        """Number of programs built."""
        self.seconds = 0.0
        """Seconds spent on building programs."""

    def program(
        self, step: Divided, width: int, example: Sequence[Tensor], shared: frozenset[int] = frozenset()
    ) -> Program:
        """Return the program of the rest of a step of ``width`` members.

        Args:
            example: a member's inputs, without results of the prefix.
            shared: indices of the inputs that are one tensor for all members, and :data:`STREAM` if all members draw
                the same random numbers. Values that depend only on these are computed once, by the operations that each
                member would use. So no member's bits change.
        """
        key = (step, width, shared)
        if key not in self._programs:
            begin = self.clock()
            with torch.inference_mode():
                self._programs[key] = self._build(step, width, example, shared)
            self.built += 1
            self.worthwhile = max(self.worthwhile, width)
            self.seconds += (seconds := self.clock() - begin)
            self.worth(step).built((width, shared), seconds)
        return self._programs[key]

    def programs(
        self, step: Divided, form: Form, example: Callable[[], Sequence[Tensor]], most: int | None
    ) -> list[Program]:
        """Return the programs that together train all members of a step, in the order of the members.

        Args:
            example: returns a member's inputs, without results of the prefix.
            most: the largest number of members trained as one. ``None``: all of them, however long building takes.
        """
        worth, (width, shared) = self.worth(step), form
        if most is None or form == ALONE:
            if form not in worth:
                self.program(step, width, example(), shared)
            return [self._programs[step, width, shared]]
        if ALONE not in worth:
            self.program(step, 1, example())
        for further, _ in [] if form in worth and width <= most else worth.pays(form, most):
            try:
                if further <= most:
                    self.program(step, further, example(), shared)
                self.worthwhile = max(self.worthwhile, further)
            except NotStackable as error:
                logger.debug("%s: the members are divided among other programs", error)
                worth.refused((further, shared))
        return [self._programs[step, *part] for part in worth.division(form, most)]

    def _build(self, step: Divided, width: int, example: Sequence[Tensor], shared: frozenset[int]) -> Program:
        members = _probes(step, example, width, _SEEDS[0], shared)
        planned = plan(step.rest, members, self._streams(width, shared), shared, self._tried)
        del members
        made = program(step.rest, planned)
        if width == 1 or self._agrees(step, made, example):
            return made
        raise NotStackable(f"the bits of a step of {width} members differ from those of {width} separate steps")

    def _agrees(self, step: Divided, made: Program, example: Sequence[Tensor]) -> bool:
        """Return whether a program gives each member of a second set the result that the member has without the
        others."""
        alone = self.program(step, 1, example)  # first, since the members below take memory
        members = _probes(step, example, made.width, _SEEDS[1], made.shared)
        states = self._streams(made.width, made.shared).states
        together = _run(step.rest, made, members, Streams(self.device, states))
        for slot, member in enumerate(members):
            streams = Streams(self.device, [states[slot]])
            reference = _run(step.rest, alone, [member], streams)
            if not all(same(mine[slot], its[0]) for mine, its in zip(together, reference, strict=True)):
                return False
        return True

    def _streams(self, width: int, shared: frozenset[int]) -> Streams:
        states = []
        for slot in range(width):
            generator = torch.Generator(self.device)
            states.append(generator.manual_seed(0 if STREAM in shared else slot).get_state())
        return Streams(self.device, states)


def _in_common(trace: Trace, shared: frozenset[int]) -> float:
    """Return the share of a step's heavy operations that are done once if members have these inputs in common."""
    heavy = [node for node in trace.graph.nodes if is_heavy(node)]
    return len(once_of(trace, shared).intersection(heavy)) / len(heavy) if heavy else 0.0


def _probes(
    step: Divided, example: Sequence[Tensor], width: int, seed: int, shared: frozenset[int]
) -> list[list[Tensor]]:
    generator, trace = torch.Generator().manual_seed(seed), step.rest
    trained, states = len(trace.trained), len(trace.trained) + len(trace.kept)
    batch = len(example) - states - len(trace.values)
    given = {
        trained + index
        for index, name in enumerate(trace.kept)
        if name in trace.unchanged and is_large(tensor := example[trained + index]) and _is_varied(tensor)
    }
    first = probe(example, generator, states, batch, moved=trace.movable, given=given)
    own = [tensor.new_empty(0) if index in shared else tensor for index, tensor in enumerate(example)]
    others = [probe(own, generator, states, batch, moved=trace.movable) for _ in range(width - 1)]
    members = [first, *([first[i] if i in shared else tensor for i, tensor in enumerate(other)] for other in others)]
    if step.prefix is None:
        return members
    places = {name: trained + index for index, name in enumerate(trace.kept)}
    reads = [places[name] for name in step.prefix.frozen] + [len(example) - batch + i for i in step.prefix.batch]
    # Members may have the prefix's results in common though its inputs differ, for example in an unused row.
    common = list(step.prefix.run(*(first[i] for i in reads))) if len(example) in shared else None
    return [[*member, *(common or step.prefix.run(*(member[i] for i in reads)))] for member in members]


def _is_varied(tensor: Tensor) -> bool:
    """Return whether most numbers of a tensor differ from one another. Such a tensor shows a difference between two
    ways of computing as well as random numbers do."""
    if not tensor.is_floating_point() or not tensor.is_contiguous():
        return False
    some = tensor.view(-1)[:: max(1, tensor.numel() // _SEEN)]
    return len(torch.unique(some)) > len(some) // 2


def _run(trace: Trace, made: Program, members: list[list[Tensor]], streams: Streams) -> list[list[Tensor]]:
    """Return all results of a program, each as a list by member."""
    first, last = len(trace.trained), len(trace.trained) + len(trace.kept)
    inputs: list[Value] = []
    for index, column in enumerate(zip(*members, strict=True)):
        stacked = index < first or last <= index < last + len(trace.values)
        inputs.append(column[0] if index in made.shared else torch.stack(column) if stacked else list(column))
    losses, gradients, kept, logged = made.run(inputs, streams)
    results: list[Value] = [*([] if losses is None else [losses]), *gradients, *kept, *logged]
    return [list(value.unbind() if isinstance(value, Tensor) else value) for value in results]
