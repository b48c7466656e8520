"""CompiledBackend: compiles forward, backward and optimizer as one function, where the user's Python code allows it."""

from __future__ import annotations

import copy
import functools
import operator
import os
import shutil
import subprocess
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from hpstage.errors import CompilerFailed, TrainingError, UsageError
from hpstage.errors.text import first_line
from hpstage.schedule import Scalar
from hpstage.torch.backends import formulas
from hpstage.torch.backends.backend import PASSING, NotDeparting, StepBackend
from hpstage.torch.backends.obstacles import obstacle_in_code, obstacle_in_training
from hpstage.torch.trainable import TorchTrainable
from hpstage.training.capture.settings import compile_by_arguments_only
from hpstage.training.private_folder import private_folder
from hpstage.training.step_log import checked_name, log, recording
from hpstage.training.warned import each_once

_MOST = 256
"""Maximum number of compilations of one trainable in a process, for different shapes and constants. If more are needed,
something that the code reads changes at each step, and compiling would take longer than any training."""
_MOST_NAMES = 256
"""Maximum number of names that a process logs in compiled code."""
_OF_PYTHON = ("_operator", "builtins")
"""Modules of Python's operators."""

_IN_DYNAMO = {
    "trace_autograd_ops": True,
    "side_effect_replay_policy": "error",  # else counters and lists are constants, recompiled at each step
    "recompile_limit": 1 << 20,  # beyond its limit torch would quietly run the code as it is
    "accumulated_recompile_limit": 1 << 20,
}
_IN_AUTOGRAD = {
    "donated_buffer": False,  # the user's code may call backward() twice
    "force_non_lazy_backward_lowering": True,  # code that cannot be compiled fails before anything has run
}


def _whole(user: TorchTrainable, model: torch.nn.Module, batch: Any, groups: Sequence[formulas.Group]) -> Tensor:
    """Train one whole step, and return the loss. The optimizer's formulas are applied to the gradients from autograd;
    no parameter gets a ``grad``."""
    loss = user.loss(model, batch)
    params = [param for group in groups for param in group.params]
    gradients = torch.autograd.grad(loss, params, allow_unused=True)
    with torch.no_grad():
        formulas.apply(groups, gradients)
    return loss.detach()


def _gradients(
    user: TorchTrainable, model: torch.nn.Module, batch: Any, params: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the loss and the gradients of a step, for an optimizer whose formula is not known."""
    loss = user.loss(model, batch)
    return loss.detach(), torch.autograd.grad(loss, params, allow_unused=True)


def _loss(user: TorchTrainable, model: torch.nn.Module, batch: Any) -> Tensor:
    """Return the loss, for a user-defined ``update``. Its backward pass is compiled as well."""
    return type(user).loss(user, model, batch)


class CompiledBackend(StepBackend):
    """Compiles a step with ``torch.compile``. A step that cannot be compiled runs as it is, and the reason is logged
    once.

    With torch's SGD, Adam and AdamW, the default ``update`` is compiled as a whole; with other optimizers, it is
    compiled up to the optimizer's step. If the user overrides ``update``, only the loss is compiled. Floats in
    ``self.hp`` and the values of param groups are 0-dimensional tensors in compiled code, so that no code depends on
    them.

    The compiled code depends only on the user's code, the shapes and the constants that the code reads. Code that
    cannot be compiled as one graph without side effects is not compiled in parts, since where torch ends a part may
    depend on what else the process has compiled. The rest of such a trial is trained as it is. Its states record this,
    so that every fork does the same.
    """

    numerics: ClassVar[str] = "compiled-v2"
    draws_otherwise: ClassVar[bool] = True
    begins: ClassVar[float] = 25.0  # measured: 20 to 35 on two cores with an empty cache
    _static: ClassVar[bool] = False
    """Whether the optimizer's state must stay in the same tensors."""

    def __init__(self, subject: TorchTrainable, device: torch.device) -> None:
        super().__init__(subject, device)
        _start_compiler()
        compile_by_arguments_only()
        self.compiled = 0
        """Number of compiled graphs."""
        self._own_update = type(subject).update is not TorchTrainable.update
        self._impossible = obstacle_in_code(type(subject))
        self._functions: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._formula: formulas.Formula | None = None
        self._values: dict[str, Tensor] = {}
        self._initial: tuple[tuple[str, Scalar], ...] = ()
        self._is_first = False
        self._hopeless: set[tuple[tuple[str, Scalar], ...]] = set()
        self._warn = each_once()
        self._runs = self._lowers = False
        self._logged = _LoggedInTensors(device)
        self._names: tuple[str, ...] = ()  # logged by the code that ran last

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        lacks = cls._lacks_tracing()
        if lacks is not None:
            return lacks
        if device.type not in ("cpu", "cuda"):
            return f"torch.compile is not known to be deterministic on {device.type}"
        if device.type == "cuda":
            from torch.utils._triton import has_triton

            return None if has_triton() else "torch.compile needs Triton on this GPU"
        return None if _compiler() else "torch.compile needs a C++ compiler (g++ or clang++)"

    @staticmethod
    def _lacks_tracing() -> str | None:
        import torch._dynamo.config as config

        if all(hasattr(config, name) for name in _IN_DYNAMO):
            return None
        return f"torch {torch.__version__} cannot compile a step as one graph (2.13 can)"

    @classmethod
    def describe(cls) -> dict[str, str]:
        return {"compiler": _compiler()}

    def begin(self, initial: Mapping[str, Scalar]) -> None:
        self._initial = tuple(sorted(initial.items()))
        self._is_first = True
        self.as_it_is = self._initial in self._hopeless

    def release(self) -> None:
        self._formula = None  # it holds the optimizer, which holds the model

    def load(self, state: Any) -> None:
        super().load(state)
        self._is_first = False

    @property
    def departs(self) -> bool:
        return not (self.as_it_is or self._impossible)

    def train(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor | float | None:
        try:
            return self._train(model, optimizer, batch)
        finally:
            self._is_first = False

    def _train(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor | float | None:
        user = self.subject
        if not self.as_it_is:
            obstacle = self._impossible or obstacle_in_training(model, optimizer, batch)
            if obstacle is not None:
                self._say(obstacle)  # not remembered, since each step looks for it again
                if self.comparing:
                    raise NotDeparting
            elif self._own_update:
                return self._update_with_compiled_loss(model, optimizer, batch)
            elif formulas.has_formula(optimizer, static=self._static):
                if self._formula is None or self._formula.optimizer is not optimizer:
                    self._formula = formulas.Formula(optimizer, static=self._static)
                done, loss = self._attempt(_whole, model, batch, self._formula.groups())
                if done:
                    return loss  # type: ignore[no-any-return]
            else:
                params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
                done, found = self._attempt(_gradients, model, batch, params)
                if done:
                    loss, gradients = found
                    for param, gradient in zip(params, gradients, strict=True):
                        param.grad = gradient
                    optimizer.step()
                    return loss  # type: ignore[no-any-return]
        return user.update(model, optimizer, batch)

    def _update_with_compiled_loss(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any
    ) -> Tensor | float | None:
        user = self.subject
        if "loss" in vars(user):
            return user.update(model, optimizer, batch)

        def loss(model: torch.nn.Module, batch: Any) -> Tensor:
            if not self.as_it_is:
                done, found = self._attempt(_loss, model, batch)
                if done:
                    return found  # type: ignore[no-any-return]
            return type(user).loss(user, model, batch)

        vars(user)["loss"] = loss
        try:
            return user.update(model, optimizer, batch)
        finally:
            vars(user).pop("loss", None)

    def _attempt(self, function: Callable[..., Any], model: torch.nn.Module, *args: Any) -> tuple[bool, Any]:
        """Call the compiled form of a function. Return whether it could be compiled, and its result."""
        user = self.subject
        present = user.hp
        object.__setattr__(user, "hp", self._in_tensors(present, model))
        self._names, self._lowers = (), False
        _names_traced()
        try:
            with _settings(), warnings.catch_warnings(), recording(self._logged):
                warnings.simplefilter("ignore")
                result = self._function(function)(user, model, *args)
            for name, value in self._logged.take(self._names):
                log(name, value)
            return True, result
        except UsageError:
            raise
        except Exception as error:
            if self._runs:
                self._runs = False
                raise  # the compiled code has failed, not its compilation
            # torch always gives the same verdict on the same code. An error is no verdict if memory, a file or
            # another process was missing, or if torch compiled no frame and so ran the code as it is.
            verdict = "no compiled frames" not in str(error) and not isinstance(_origin(error), PASSING)
            if self._lowers or not verdict:
                raise _failed(type(user).__name__, error) from error
            self.as_it_is = True
            if self._is_first:
                self._hopeless.add(self._initial)
            self._say(_reason(error))
            if self.comparing:
                raise NotDeparting from error
            return False, None
        finally:
            object.__setattr__(user, "hp", present)

    def _function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if function not in self._functions:
            assert isinstance(function, FunctionType)
            # A copy of the code object, since torch stores what it has compiled with that object.
            own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
            self._functions[function] = torch.compile(own, fullgraph=True, dynamic=False, backend=self._compile)
        return self._functions[function]

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.compiled == _MOST:
            raise UsageError(
                f"{type(self.subject).__name__}: a step was compiled {_MOST} times, since shapes or numbers that "
                f"loss() reads keep changing; give numerics = 'eager'"
            )
        _keep_numbers(graph.graph, self._values.values())
        recorded = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))  # lowering may change the graph
        self._lowers = True
        made = self.lower(graph, inputs)  # torch may interrupt it, and start again with fewer constants
        self._lowers = False
        self.compiled += 1
        names = _names_traced()

        def run(*args: Any) -> Any:
            self._runs, self._names = True, names
            result = recorded.forward(*args) if self.as_recorded else made(*args)
            self._runs = False
            return result

        return run

    def lower(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return a function that computes the graph."""
        from torch._inductor.compile_fx import compile_fx

        made: Callable[..., Any] = compile_fx(graph, inputs)  # type: ignore[assignment]
        return made

    def _in_tensors(self, hp: Mapping[str, Scalar], model: torch.nn.Module) -> dict[str, Any]:
        values: dict[str, Any] = dict(hp)
        double = any(param.dtype == torch.float64 for param in model.parameters())
        dtype = torch.float64 if double else torch.float32
        for name, value in values.items():
            if isinstance(value, float):
                tensor = self._values.get(name)
                if tensor is None or tensor.dtype != dtype:
                    self._values[name] = tensor = torch.zeros((), dtype=dtype, device=self.device)
                values[name] = tensor.fill_(value)
        return values

    def _say(self, reason: str, what: str = "compiling it") -> None:
        self._warn("%s is trained without %s: %s", type(self.subject).__name__, what, reason)


@contextmanager
def _settings() -> Iterator[None]:
    """Apply the settings of torch's compiler during a call. torch's own ``patch`` takes 0.1 ms: too long for each
    step."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as autograd

    named = [(dynamo, name, value) for name, value in _IN_DYNAMO.items()]
    named += [(autograd, name, value) for name, value in _IN_AUTOGRAD.items()]
    before = [getattr(module, name) for module, name, _ in named]
    try:
        for module, name, value in named:
            setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(named, before, strict=True):
            setattr(module, name, value)


@functools.cache
def _start_compiler() -> None:
    """Compile a trivial function. The first compilation makes torch replace functions of its own; training must not
    appear to have done that."""
    # torch's default is a folder with a predictable name, which another account may have created first. Files in it
    # are executed.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(private_folder(), "compiled"))
    torch.compile(torch.neg, backend="eager")(torch.zeros(1))


@functools.cache
def _compiler() -> str:
    """Return the first line of the C++ compiler's version; empty if there is no compiler."""
    found = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if found is None:
        return ""
    output = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    return output.partition("\n")[0].strip()


def _origin(error: BaseException) -> BaseException:
    inner = getattr(error, "inner_exception", None) or error.__cause__
    return error if inner is None or inner is error else _origin(inner)


def _failed(who: str, error: Exception) -> Exception:
    """Return the error for a step that could not be compiled. Training without compilation would give other bits."""
    origin = _origin(error)
    message = str(origin).strip().partition("\n")[0]
    what = f"{type(origin).__name__}: {message}" if message else type(origin).__name__
    if isinstance(origin, PASSING):
        return CompilerFailed(
            f"compiling a step of {who} has failed: {what}. Training without compilation would give other bits under "
            f"the same key. Free memory or disk space, or remove the folder of TORCHINDUCTOR_CACHE_DIR if a file in "
            f"it is broken"
        )
    return TrainingError(f"torch cannot compile {who}: {what}. Give numerics = 'eager'")


def _reason(error: Exception) -> str:
    text = first_line(error)
    if "side effects" in text:
        return "loss() changes Python objects (counters, lists, modules), which compiled code cannot"
    return f"torch says: {text}"


_places: dict[str, int] = {}  # the index of each name in the tensors
_traced: list[str] = []  # names found in compiled code since the list was emptied


def _place(name: str) -> int:
    """Return the index of a name. Called while code is compiled, not while it runs."""
    if checked_name(name) not in _places and len(_places) == _MOST_NAMES:
        raise ValueError(f"more than {_MOST_NAMES} names are logged")
    _traced.append(name)
    return _places.setdefault(name, len(_places))


def _names_traced() -> tuple[str, ...]:
    """Return the names that the most recently compiled code logs, and forget them."""
    names = tuple(dict.fromkeys(_traced))
    _traced.clear()
    return names


class _LoggedInTensors:
    """The sums and counts of logged values by name. They are tensors, since compiled code cannot change Python
    objects."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(_MOST_NAMES, dtype=torch.float64, device=device)
        self._counts = torch.zeros(_MOST_NAMES, dtype=torch.float64, device=device)
        torch._dynamo.assume_constant_result(_place)  # type: ignore[no-untyped-call]  # its import takes seconds
        for tensor in (self._sums, self._counts):
            torch._dynamo.mark_static_address(tensor)  # else torch records no CUDA graph

    def log(self, name: str, value: Any) -> None:
        place = _place(name)
        self._sums[place].add_(value.detach().reshape(()) if isinstance(value, torch.Tensor) else float(value))
        self._counts[place].add_(1)

    def take(self, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        """Yield each of these names with the mean of the values logged under it, and reset all sums."""
        if not names:
            return
        means = self._sums / self._counts
        values = means.tolist() if means.device.type == "cpu" else means
        self._sums.zero_()
        self._counts.zero_()
        yield from ((name, values[_places[name]]) for name in names)


def _keep_numbers(graph: torch.fx.Graph, numbers: Collection[Tensor]) -> None:
    """Replace operators that change numbers in place in a graph of Dynamo's: ``w = self.hp["gamma"]; w += 1`` must
    create a new number.

    A value that code computes only from numbers, by Python's operators, is also a number, and is not changed in place.

    Args:
        numbers: the graph's inputs that stand for numbers.
    """
    known: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            given = getattr(node.meta.get("grapharg"), "example", None)
            if any(given is number for number in numbers):
                known.add(node)
        elif node.op == "call_function" and getattr(node.target, "__module__", None) in _OF_PYTHON:
            given = node.args[:1]
            if known.issuperset(given) and (made := _out_of_place(node.target)) is not None:
                node.target = made
            if node.all_input_nodes and known.issuperset(node.all_input_nodes):
                known.add(node)


def _out_of_place(function: Any) -> Callable[..., Any] | None:
    """Return the operator that does the same as an in-place one but returns a new object; ``None`` for other
    functions."""
    name = getattr(function, "__name__", "").strip("_")
    if not name.startswith("i") or getattr(operator, name, None) is None:
        return None
    found: Callable[..., Any] | None = getattr(operator, name[1:], None) or getattr(operator, f"{name[1:]}_", None)
    return found
