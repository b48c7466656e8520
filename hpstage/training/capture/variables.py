"""Local variables of paused code: those that matter are in the state, or must stay as they were."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpstage.errors import StateError
from hpstage.training.capture.aliases import holding
from hpstage.training.capture.decoding import Decoder
from hpstage.training.capture.encoding import Encoder, Plain
from hpstage.training.capture.kind import same_value
from hpstage.training.capture.kinds import CACHE, VALUES
from hpstage.training.capture.portrait import Difference, shown, text_of, texts_of
from hpstage.training.capture.refusals import held_by_nothing
from hpstage.training.capture.stateless import LOCAL, MOST, joined, root_of, to_exclude
from hpstage.training.capture.survey import Record, Survey, plainly
from hpstage.training.capture.surveyor import Surveyor
from hpstage.training.capture.values import storable
from hpstage.training.code.bytecode import inner
from hpstage.training.code.namespaces import MISSING, ClassAttributes, Globals


@dataclass(frozen=True, slots=True)
class Variable:
    """A local variable of a paused frame that runs ``code``, with its value if it has one.

    Attributes:
        needed: whether ``code`` may read it later without a ``with`` block having swallowed an exception. A variable
            that is not needed may have no value in a fork: reading it there is an error, and never gives a wrong value.
        fresh: names of variables of the frame that functions nested in ``code`` read only after ``code`` has assigned
            them again.
        settable: whether a fork can set it, since the frame keeps nothing but variables: no operand of an expression,
            and no iterator of an enclosing loop.
    """

    name: str
    code: types.CodeType
    value: object = MISSING
    needed: bool = True
    fresh: frozenset[str] = frozenset()
    settable: bool = False


class Variables:
    """The values of local variables, and of all objects reachable only through them, at one time.

    Args:
        variables: variables that may matter.
        surveyor: the surveyor of the world.
        world: the survey of the world that forks begin with. Its objects are in every state.
    """

    def __init__(self, variables: Iterable[Variable], surveyor: Surveyor, world: Survey) -> None:
        self._variables = list(variables)
        self._surveyor = surveyor
        self._unset: Mapping[str, str] = {}
        self.only_here = surveyor.survey(_roots(self._variables), beyond=world, sampled=True)

    def survey(self, variables: Sequence[Variable], world: Survey) -> Survey:
        """Survey the objects that are now reachable only through the same variables, in the given world.

        Raises:
            StateError: an object is now referred to by weak references alone.
        """
        now = self._surveyor.survey(_roots(variables), known=self.only_here, beyond=world)
        for key in now.weak - self.only_here.weak:
            raise held_by_nothing(now.records[key].path)
        return now

    def capture(self, variables: Sequence[Variable], world: Survey, now: Survey, encoder: Encoder) -> dict[str, Plain]:
        """Return the changes as a plain state.

        Args:
            variables: the same variables as they are now.
            world: the survey of the present world.
            now: the result of :meth:`survey`.
            encoder: the encoder that has encoded the changes in the world.

        Raises:
            StateError: no state can hold some changes. The message names all of these.
        """
        found: list[Difference] = []
        refused: list[str] = []
        values: dict[str, Plain] = {}
        changed: dict[str, Plain] = {}
        encoder.admit(self.only_here)
        settable = {variable.name for variable in variables if variable.settable}
        for record, present in self._changed_contents(world, now, encoder):
            if root_of(record.path) not in settable:
                found += self._differences(record)
                continue
            if (why := encoder.other_dict(record)) is not None:
                refused.append(why)
            try:
                if record.kind is VALUES and present.plain:
                    values[record.path] = storable(record.obj)
                if record.kind is not VALUES or not (present.plain and present.same_place(record.content)):
                    changed[record.path] = encoder.content(record, present)
            except StateError as error:
                refused.append(str(error))
        named: dict[str, Plain] = {}
        unset = {variable.name: self._unset[variable.name] for variable in variables
                 if variable.value is MISSING and variable.name in self._unset}  # fmt: skip
        for before, after in zip(self._variables, variables, strict=True):
            name, value = after.name, after.value
            same = same_value(before.value, value)
            if same and type(value) is weakref.ref and value() in self.only_here:
                if value() not in now and value() not in world:
                    refused.append(str(held_by_nothing(f"what {LOCAL}{name} refers to")))
                continue
            if (before.value is MISSING and not before.needed) or (same and not _leads_to_new(value, encoder)):
                continue
            if after.settable and value is not MISSING:
                try:
                    named[name] = encoder.attempt(LOCAL + name, value)
                    continue
                except StateError as error:
                    if before.value is not MISSING:
                        refused.append(str(error))
                    unset[name] = str(error)  # reading it in a fork raises an error with this reason
                    continue
            if not same and not _in_a_known_cell(after, world):
                found.append((LOCAL + name, text_of(before.value, world), text_of(value, world)))
        if found:
            functions = {one.name for one in self._variables if isinstance(one.value, types.FunctionType)}
            refused.append(_changed(found, functions))
        if refused:
            raise StateError(joined(refused))
        if not (values or changed or named or unset):
            return {}
        return {"values": values, "changed": changed, "variables": named} | ({"unset": unset} if unset else {})

    def load(
        self,
        state: Mapping[str, Any],
        decoder: Decoder,
        write: Callable[[dict[str, object], Mapping[str, str]], None],
    ) -> None:
        """Restore a captured state. ``write`` sets variables; it is also given those that stay unset, and why."""
        decoder.admit(self.only_here)
        with plainly():
            decoder.fill(state["values"], state["changed"])
            decoder.write_all(state["changed"])
            values = {name: decoder.value(value) for name, value in state["variables"].items()}
            self._unset = state.get("unset", {})
            write(values, self._unset)

    def _changed_contents(self, world: Survey, now: Survey, encoder: Encoder) -> Iterator[tuple[Record, Any]]:
        """Yield the records of objects that have changed, or lead to new objects, each with the present content."""
        fresh = self._fresh_cells()
        changed = [
            record
            for record in self.only_here
            if record.kind is not CACHE
            and id(record.obj) not in fresh
            and record.obj in now
            and (record.changed() or any(encoder.is_new(child) for _, child in record.inner))
        ]
        if not changed:
            return
        classes = {_space(record.obj) for record in world if isinstance(record.obj, ClassAttributes)}
        in_state = holding(world)
        for record in changed:
            content = record.read()
            if isinstance(record.obj, ClassAttributes) and _space(record.obj) in classes:
                continue
            if record.kind is VALUES and record.content.same_place(content) and in_state(record.obj):
                continue  # another name for something in the state
            yield record, content

    def _fresh_cells(self) -> set[int]:
        """Return ids of cells that are written again before a function reads them."""
        codes = {
            (id(nested), name)
            for code, fresh in {(variable.code, variable.fresh) for variable in self._variables}
            for name in fresh
            for nested in _closing_over(code, name)
        }
        functions = [record.obj for record in self.only_here if codes and type(record.obj) is types.FunctionType]
        return {
            id(cell)
            for function in functions
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            if (id(function.__code__), name) in codes
        }

    def _differences(self, record: Record) -> list[Difference]:
        if record.kind is VALUES:
            return [(record.path, "different in values, form or gradient", text_of(record.obj, self.only_here))]
        present = Record(record.path, record.obj, record.kind, record.read(), record.skip)
        if record.kind.name == "iterator":
            return [(record.path, "where it stood", "further on")]
        before, now = (dict(texts_of(one, self.only_here)) for one in (record, present))
        texts = [(path, before.get(path, _NOTHING), now.get(path, _NOTHING)) for path in {**before, **now}]
        found = [(path, was, has_become) for path, was, has_become in texts if was != has_become]
        return found or [(record.path, "something else", f"a {type(record.obj).__qualname__} that has changed")]


def _leads_to_new(value: object, encoder: Encoder) -> bool:
    if type(value) is tuple:
        return any(_leads_to_new(item, encoder) for item in value)
    return encoder.is_new(value.__self__ if type(value) is types.MethodType else value)


def _roots(variables: Iterable[Variable]) -> list[tuple[str, object]]:
    return [(LOCAL + variable.name, variable.value) for variable in variables]


_NOTHING = "nothing"


def _changed(found: list[Difference], functions: Collection[str]) -> str:
    """Return the message. ``functions`` are variables that hold functions, which close over changed variables."""
    roots = {path: root_of(path) for path, _, _ in found}
    closed = {path.rpartition(".")[2]: root for path, root in roots.items() if root in functions}
    names = list(dict.fromkeys(root for root in roots.values() if root not in functions)) or list(closed)
    local = found[0][0].startswith(LOCAL)
    attach = " or ".join(f"`{name}`" for name in names) if local else "it"
    more = ""
    if local and closed:
        takers = ", ".join(dict.fromkeys(closed.values()))
        more = f"; set what {takers} closes over ({', '.join(closed)}) first in each step, or pass it as arguments"
    if len(found) == 1:
        path, was, now = found[0]
        what = (
            f"training has changed {shown(path)}, which it may read in a later step, and which is in no state: it was "
            f"{was} where the loop over run.steps() began and is {now}, so that a fork would continue differently. "
        )
    else:
        lines = [f"\n  {shown(path)} was {was} and is {now}" for path, was, now in found[:MOST]]
        if len(found) > MOST:
            lines.append(f"\n  and {len(found) - MOST} more")
        what = (
            f"training has changed {shown(found[0][0])} and {len(found) - 1} more since the loop over run.steps() "
            f"began, which it may read in a later step, and which are in no state, so that a fork would continue "
            f"differently:{''.join(lines)}\n"
        )
    if names == ["enumerate"]:
        return f"{what}run.step is the number of the step, in a fork as well: use it, and loop without enumerate()"
    return (
        f"{what}A fork can set only variables of the function that has the loop `for step in run.steps():`, and only "
        f"if that is in no other loop: write it so. Or attach {attach} (anything with state_dict and load_state_dict "
        f"can be), keep it as an attribute of something that is attached, or make it a function of the step; if "
        f"training does not depend on it, name it in `stateless` of the function: "
        f"{to_exclude(*(path for path, _, _ in found))}{more}"
    )


def _in_a_known_cell(variable: Variable, world: Survey) -> bool:
    """Return whether a function in the world closes over the variable, so that its cell is in the state."""
    codes = {id(code) for code in inner(variable.code)}
    for record in world:
        function = record.obj
        if type(function) is types.FunctionType and id(function.__code__) in codes:
            cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
            cell = world.records.get(id(cells.get(variable.name)))
            if cell is not None and same_value(cell.read(), () if variable.value is MISSING else (variable.value,)):
                return True
    return False


def _closing_over(code: types.CodeType, name: str) -> Iterator[types.CodeType]:
    """Yield code nested in ``code`` whose free variable of this name is that of ``code``."""
    for nested in code.co_consts:
        if isinstance(nested, types.CodeType) and name in nested.co_freevars:
            yield nested
            yield from _closing_over(nested, name)


def _space(obj: Any) -> int:
    return id(obj.namespace if isinstance(obj, Globals) else obj.owner)
