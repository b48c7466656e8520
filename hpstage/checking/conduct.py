"""``check`` trains a trial in all ways and compares each with training it straight through. ``Children`` starts the
processes of checks, at most two at a time, and receives their records."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import cloudpickle

from hpstage.checking import ways
from hpstage.checking.causes import Style, cause_of, suspects
from hpstage.checking.comparing import Apart, first_apart
from hpstage.checking.findings import CheckReport, Finding, Verdict, Way
from hpstage.checking.ways import Process, Trials, draw
from hpstage.cluster.fork_server import ForkServer, can_fork
from hpstage.cluster.fresh import FreshProcess
from hpstage.cluster.messages import Load
from hpstage.cluster.shipping import pack
from hpstage.errors.arguments import CATCH, SEED, SPACE, checked, function, in_tuple, instance, optional, text, whole
from hpstage.execution.fork import Fork
from hpstage.execution.runs import Record
from hpstage.execution.snapshot import THREADS
from hpstage.schedule.space import Space
from hpstage.trainable import Numerics
from hpstage.training.adapter import defaults_of
from hpstage.training.borrowed import see_free
from hpstage.training.capture.stateless import stated_on
from hpstage.training.function import FunctionTrainable
from hpstage.training.identity.code_identity import packages
from hpstage.training.trainables import Keyed, as_trainable

Say = Callable[[str], None]
Take = Callable[[Record], None]
_TOGETHER = 2


class Children:
    """The processes of checks. A context manager, which kills the processes still running at its end.

    Args:
        libraries: libraries that the trainables need, imported once for several checks.
    """

    def __init__(self, libraries: Iterable[str] = ()) -> None:
        self._libraries = tuple(libraries)
        self._servers: dict[tuple[tuple[str, str], ...], ForkServer] = {}
        self._running: set[FreshProcess] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="hpstage-check-")
        self._pool = ThreadPoolExecutor(_TOGETHER)
        self._delivering, self._starting = Lock(), Lock()

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        with self._starting:
            for process in list(self._running):
                process.end()
        self._pool.shutdown(cancel_futures=True)
        for server in self._servers.values():
            server.close()
        self._folder.cleanup()

    def folder(self) -> Path:
        """Create a folder for the states of one check."""
        return Path(tempfile.mkdtemp(dir=self._folder.name))

    def perform(
        self, trainable: bytes, making: bytes | None, states: Path, processes: Iterable[Process], take: Take
    ) -> None:
        """Train a cloudpickled trainable in these processes, and wait for all of them.

        Processes with ``makes_it`` unpickle ``making`` instead, unless it is ``None``. ``take`` is called with each
        record, by one thread at a time.
        """

        def perform(process: Process) -> None:
            with self._starting:
                server = self._server(process.variables)
                packed = making if making is not None and process.makes_it else trainable
                fresh = FreshProcess(Load(packed, {}), server=server, variables=process.variables)
                self._running.add(fresh)
            try:
                environment = fresh.described()
                for run in process.runs:
                    record = fresh.perform(run, str(states))
                    if run is process.runs[0] and environment is not None:
                        record.workload = environment.described | environment.identity
                        record.code = environment.loaded
                    with self._delivering:
                        take(record)
                    if fresh.has_ended or (record.problem is not None and run.kept):
                        return  # the other runs begin with the states of this one
            finally:
                self._running.discard(fresh)
                fresh.kill()

        for future in [self._pool.submit(perform, process) for process in processes]:
            future.result()

    def _server(self, variables: Mapping[str, str]) -> ForkServer | None:
        key = tuple(sorted(variables.items()))
        if key not in self._servers and can_fork():
            self._servers[key] = ForkServer(self._libraries, variables, with_threads=True)
        return self._servers.get(key)


@checked(
    space=SPACE,
    steps=optional(whole(2, 10_000)),  # about ten times as many are trained
    n_forks=whole(most=10_000),
    seed=SEED,
    catch=CATCH,
    numerics=optional(text("the name of a step backend, such as 'compiled'")),
    say=optional(function("a function of a line")),
    make=optional(function("a function without arguments that makes the trainable")),
    children=optional(instance(Children, "hpstage.checking.Children()")),
)
def check(
    trainable: object,
    space: Space,
    *,
    steps: int | None = None,
    n_forks: int = 3,
    seed: int = 0,
    catch: Iterable[type[Exception]] | type[Exception] = (Exception,),
    numerics: Numerics | None = None,
    say: Say | None = None,
    make: Callable[[], object] | None = None,
    children: Children | None = None,
) -> CheckReport:
    """Check whether a trainable is exact: straight through or forked anywhere, it gives the same bits.

    A trial drawn from the space is trained straight through for a few steps in a separate process, and again: in
    another process (with other string hashes, at another time), in a process that was given several threads, from
    states in memory and on disk at random steps, in a new process, after another trial, with an evaluation after each
    step, and without capturing states. After each step weights, optimizer, buffers, gradients, generators, attributes,
    globals, local variables, process-wide settings and the result of ``state_dict()`` are compared, and metrics at the
    end.

    ::

        report = hpstage.check(Digits(), space)
        assert report.ok, report

    Args:
        trainable: as for :func:`hpstage.optimize`. It is sent to other processes, as to workers.
        space: the search space, from which trials are drawn at random.
        steps: number of steps to train straight through; ``None``: 8, or up to 19 if the schedules' first joint is
            near. About ten times as many are trained in all.
        n_forks: number of random steps at which to fork.
        seed: seed for choosing trials and forks.
        catch: exceptions by which the space rejects a trial, as for :func:`hpstage.optimize`: another one is drawn.
        numerics: the step backend to check a :class:`hpstage.torch.TorchTrainable` with; ``None``: its own.
        say: called with lines that report progress.
        make: makes the trainable. One of the processes calls it, as a later search would, so that random values drawn
            when a class or an object is created are found, too. The command ``hpstage check`` passes a function that
            imports the script.
        children: the processes, to be shared by several checks; by default, each check starts its own.

    Raises:
        UsageError: nothing can be checked, since the space or the trainable is invalid.
    """
    began = time.perf_counter()
    with ExitStack() as closing:
        if numerics is not None:
            closing.enter_context(_trained_by(trainable, numerics))
            make = make and partial(_made, make, numerics)
        trainer = as_trainable(trainable)
        subject = getattr(trainer, "subject", trainable)
        see_free(subject)
        trials = draw(space, steps, seed, defaults_of(subject), in_tuple(catch))
        forks = ways.forks_of(trials.steps, n_forks, seed)
        first, second = ways.processes(trials, forks)
        name = getattr(subject, "__qualname__", type(subject).__qualname__)
        if say is not None:
            say(_beginning(name, trials, forks, (*first, *second)))
        found = _Found(say, answered=isinstance(trainer, Keyed))
        packed = pack(trainable, packages(trainer))
        making = make and pack(_Making(make), packages(trainer))
        if children is None:
            children = closing.enter_context(Children(libraries_of(trainer)))
        states = children.folder()
        children.perform(packed, making, states, first, found.take)
        if found.straight.problem is None:
            children.perform(packed, making, states, second, found.take)
    # The process with other threads has the same hash seed as the first process; everything else differs.
    hashes = found.apart(ways.AGAIN) is not None and not found.unlike(ways.THREADS)
    style: Style = (
        "object" if isinstance(trainer, Keyed) else "function" if isinstance(trainer, FunctionTrainable) else "torch"
    )
    with stated_on(subject):
        findings = tuple(found.findings(style, hashes, suspects(subject)))
    return CheckReport(
        subject=name,
        values=trials.subject[0],
        steps=trials.steps,
        forks=forks,
        compared=len(found.straight.snapshots.get(trials.steps, {})),
        ways=tuple(found.way(name, trials.steps) for name in (ways.STRAIGHT, *ways.WAYS)),
        differences=findings,
        seconds=time.perf_counter() - began,
        beside_eager=found.straight.beside_eager,
    )


@contextmanager
def _trained_by(trainable: object, numerics: str) -> Iterator[None]:
    """Set the step backend of the user's object within the context."""
    subject: Any = getattr(trainable, "subject", trainable)
    before = vars(subject).copy()
    subject.numerics = numerics
    try:
        yield
    finally:
        if "numerics" in before:
            subject.numerics = before["numerics"]
        else:
            del subject.numerics


class _Making:
    """An object that, when unpickled, becomes the result of calling ``make`` in that process, sent as a search sends
    it."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._make = make

    def __reduce__(self) -> tuple[Callable[[Callable[[], object]], object], tuple[Callable[[], object]]]:
        return _sent, (self._make,)


def _sent(make: Callable[[], object]) -> object:
    """Make the trainable in a fork, which stands for the process of a search, and unpickle it here. Objects that it
    shared with another module are then separate copies, as in all other processes of the check."""
    if sys.platform != "linux":
        return make()
    try:
        fork = Fork(lambda: pack(made := make(), packages(as_trainable(made))))
        while (packed := fork.wait(60)) is None:
            pass
    except OSError:  # forking is impossible, or the fork has ended: an error of make() is raised here again
        return make()
    return cloudpickle.loads(packed)


def _made(make: Callable[[], Any], numerics: str) -> object:
    made = make()
    made.numerics = numerics
    return made


def libraries_of(trainable: object) -> list[str]:
    """Return the modules that every process imports before it trains a trainable."""
    return ["numpy", *(name for name in ("torch",) if name in packages(trainable))]


def _beginning(name: str, trials: Trials, forks: Sequence[int], processes: Sequence[Process]) -> str:
    params = ", ".join(f"{key}={value!r}" for key, value in trials.params.items())
    trained = sum(run.steps for process in processes for run in process.runs if run.name != ways.ANOTHER)
    return (
        f"{name} with {params or 'the one trial of the space'}: {trials.steps} steps straight through, forks at "
        f"{', '.join(map(str, forks))}; at most {trained:,} steps to compare, in {len(processes)} processes"
    )


class _Found:
    """The records of a check, and conclusions from them."""

    def __init__(self, say: Say | None, *, answered: bool) -> None:
        self._say = say
        self._answered = answered
        self._records: dict[str, list[Record]] = {}

    def take(self, record: Record) -> None:
        self._records.setdefault(record.name, []).append(record)
        if self._say is not None:
            begun = f" at {record.fork}" if record.fork else ""
            how = "" if record.problem is None else f", {record.problem.kind}"
            self._say(f"{record.name}{begun}: {record.seconds:.1f} s{how}")

    @property
    def straight(self) -> Record:
        return self._records[ways.STRAIGHT][0]

    def _of(self, way: str) -> list[Record]:
        return sorted(self._records.get(way, []), key=lambda record: record.fork)

    def apart(self, way: str) -> tuple[Record, Apart] | None:
        """Return the first record that differs from training straight through, and the difference."""
        if self.straight.problem is not None:
            return None
        for record in self._of(way):
            apart = first_apart(self.straight, record, reports=way != ways.EVALUATED, answered=self._answered)
            if apart is not None:
                return record, apart
        return None

    def unlike(self, way: str) -> bool:
        """Return whether a run in this way did not finish, or ended differently."""
        return self._problem(way) is not None or self.apart(way) is not None

    def _problem(self, way: str) -> Record | None:
        return next((record for record in self._of(way) if record.problem is not None), None)

    def _threads(self) -> Apart | None:
        """Return the difference if training has set a number of threads other than one."""
        for step, snapshot in sorted(self.straight.snapshots.items()):
            if snapshot.get(THREADS, "1") != "1":
                return Apart(step, THREADS, "1, as hpstage has set it", snapshot[THREADS], False, ())
        return None

    def way(self, name: str, steps: int) -> Way:
        records = self._of(name)
        verdict: Verdict = "equal" if records else "not tried"
        stopped = self._problem(name)
        if stopped is not None and stopped.problem is not None:
            verdict = stopped.problem.kind
        elif self.apart(name) is not None or (name == ways.STRAIGHT and self._threads() is not None):
            verdict = "differs"
        trained = sum((steps if r.problem is None else r.problem.step) - r.fork for r in records)
        return Way(name, verdict, trained, sum(record.seconds for record in records))

    def findings(self, style: Style, hashes: bool, suspected: Sequence[str]) -> Iterator[Finding]:
        """Yield one finding for each way that is not equal."""
        threads = self._threads()
        if threads is not None:
            yield _finding(ways.STRAIGHT, 0, threads, *cause_of(ways.STRAIGHT, threads, style, hashes, suspected))
        for way in (ways.STRAIGHT, *ways.WAYS, ways.ANOTHER):
            stopped = self._problem(way)
            if stopped is not None and stopped.problem is not None:
                problem = stopped.problem
                yield Finding(way, problem.kind, problem.step, fork=stopped.fork, cause=problem.text)
            elif way not in (ways.STRAIGHT, ways.ANOTHER) and (found := self.apart(way)) is not None:
                record, apart = found
                yield _finding(way, record.fork, apart, *cause_of(way, apart, style, hashes, suspected))


def _finding(way: str, fork: int, apart: Apart, cause: str, remedy: str) -> Finding:
    return Finding(
        way,
        "differs",
        apart.step,
        fork=fork,
        what=apart.path,
        straight=apart.straight,
        found=apart.found,
        others=apart.others,
        cause=cause,
        remedy=remedy,
    )
