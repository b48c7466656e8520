"""A trainable's world: all mutable objects that training can reach, so that any change is captured or refused.

A world is surveyed at three times:

- before anything is set up (*pristine*). Every fresh setup restores that, so that no trial sees what another left;
- after setup with the hyperparameters of step 0 (*base*). The same code makes this equal in every process, so that
  objects are identified by their paths in it;
- whenever a state is captured. It consists of the differences from the base, and of all tensors and arrays that setup
  created.
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

from hpstage.errors import StateError
from hpstage.training.capture import settings
from hpstage.training.capture.caches import refuse_results_of_state
from hpstage.training.capture.class_dicts import ClassDicts
from hpstage.training.capture.decoding import Decoder
from hpstage.training.capture.encoding import ANSWERED, Encoder, is_answered
from hpstage.training.capture.endings import acts_at_end
from hpstage.training.capture.guard import Guard
from hpstage.training.capture.kind import same_value, torch
from hpstage.training.capture.kinds import CACHE, MODULES, STORAGE, VALUES
from hpstage.training.capture.late import met_late, registered_late
from hpstage.training.capture.portrait import texts_of
from hpstage.training.capture.refusals import cannot_be_read, dropped, held_by_nothing
from hpstage.training.capture.stateful import results_kept
from hpstage.training.capture.stateless import excluding, joined, unmarked
from hpstage.training.capture.survey import UNKNOWN, Record, Survey, plainly
from hpstage.training.capture.surveyor import Surveyor
from hpstage.training.capture.values import Marked, is_lazy, storable
from hpstage.training.capture.variables import Variable, Variables
from hpstage.training.code.namespaces import libraries
from hpstage.training.code.owner import is_users_code
from hpstage.training.code.patches import code_in_libraries, standing
from hpstage.training.identity.settings import NEXT_HOOK, refuse_modes

Roots = Iterable[tuple[str, object]]
logger = logging.getLogger("hpstage")
_CANNOT = (TypeError, AttributeError, ValueError, RuntimeError, OSError)
"""Errors raised if an object cannot be restored."""


class World:
    """The world of one trainable in this process.

    Args:
        stateless: paths to ignore (see :attr:`hpstage.torch.TorchTrainable.stateless`).
        roots: returns the paths and objects from which training currently reaches all others.
    """

    surveyor: type[Surveyor] = Surveyor

    def __init__(self, stateless: Collection[str], roots: Callable[[], Roots]) -> None:
        self._stateless = stateless
        self._surveyor = self.surveyor(stateless)
        self._roots = roots
        self._patched: list[tuple[str, object]] | None = None
        self._modules: frozenset[str] = frozenset()  # those that were loaded before the first setup
        self.pristine: Survey | None = None
        self.base: Survey | None = None
        self._warned: set[str] = set()
        self._cached: dict[int, Record] = {}
        self._filled: dict[int, Any] = {}
        self._entered: Variables | None = None
        self._shared: ClassDicts | None = None

    def _all_roots(self) -> Iterator[tuple[str, object]]:
        settings.compile_by_arguments_only()  # torch may have been imported, or set to compile, since the last survey
        yield from self._roots()
        yield from self.patches()
        refuse_modes()
        if torch() is not None:
            yield from settings.hooks_of_all()
            yield from libraries()
        yield from ((settings.PATH, settings.SETTINGS), (settings.REGISTERED, settings.REGISTRATIONS))

    def take_patches(self, patched: Iterable[tuple[str, object]]) -> None:
        """Set the user's functions and classes in libraries as of before the first setup, each with its place there."""
        self._patched = [*code_in_libraries(patched)]

    def patches(self) -> Sequence[tuple[str, object]]:
        """Return the user's functions in libraries as of the first search for them, which precedes the first setup."""
        if self._patched is None:
            self.take_patches(standing())
        assert self._patched is not None
        return self._patched

    def close(self, but: Callable[[str], bool] = lambda path: False) -> None:
        """Restore everything as far as possible to how it was before the first setup, and forget it.

        Args:
            but: returns whether the object at a path is left as it is.
        """
        self._note_filled()
        for cache in self._filled.values():
            cache.cache_clear()  # results must depend on arguments alone; later training shows if they do not
        self._filled.clear()
        late = self._met_late()
        self.base = None
        self._cached.clear()
        if self.pristine is not None:
            for record in (*self.pristine, *late):
                if not but(record.path) and record.changed():
                    with suppress(*_CANNOT):  # no training follows
                        record.restore()
            self.pristine = None
        if self._shared is not None:
            self._shared.put_back()

    def reset(self) -> None:
        """Restore all that training can reach to how it was before the first setup. The first call only records it.

        Raises:
            StateError: something has changed that cannot be restored. The message names it.
        """
        for record in self._met_late():
            if record.changed():
                raise StateError(
                    f"{unmarked(record.path)} has changed in training. Its module was first imported in model() or "
                    "setup(), so a trial would begin with the value that another trial left. Import it at the top of "
                    f"your module; {excluding(record.path)}"
                )
        self._note_filled()
        self.base = None
        self._shared = self._shared or ClassDicts()
        self._shared.begin()
        if self.pristine is None:
            self.pristine = self._surveyor.survey(self._all_roots(), copied=True)
            self._modules = frozenset(sys.modules)
        else:
            for record, module in registered_late(self.pristine, self._modules):
                raise StateError(
                    f"{unmarked(record.path)} has classes or functions that {module} has put there. That module was "
                    "first imported in model() or setup(), and is not run again for the next trial, which would not "
                    f"find them: import {module} at the top of your module; {excluding(record.path)}"
                )
            self._watch(self._cached.values())
            for record in self.pristine:
                _put_back(record, "a trial would begin with what another has left")

    def _note_filled(self) -> None:
        """Record the caches of functions that were filled after setup."""
        for record in self.base or ():
            if record.kind is CACHE and record.changed():
                self._filled[id(record.obj)] = record.obj

    def _met_late(self) -> list[Record]:
        """Return records of objects of modules that setup was the first to load: their earlier content is unknown."""
        return [] if self.base is None or self.pristine is None else [*met_late(self.base, self.pristine)]

    def begin(self) -> None:
        """Mark the end of setup: changes count from here.

        Raises:
            StateError: what training begins with cannot be captured.
        """
        assert self.pristine is not None, "reset() comes first"
        self.base = self._surveyor.survey(self._all_roots(), known=self.pristine)
        self._watch(self.base.cached.values())
        for record in self.base:
            if record.kind is not VALUES:
                continue
            if is_lazy(record.obj):
                raise StateError(
                    f"{unmarked(record.path)} has no shape yet, and forks begin before the first batch gives it one: "
                    f"run a batch through the model in model(), as torch recommends before an optimizer is made"
                )
            before = self.pristine.records.get(id(record.obj))
            if before is not None and before is not record:  # setup has changed it
                record.content = Marked(record.obj, sampled=True, copied=True)

    def enter(self, variables: Iterable[Variable]) -> None:
        """Enter a loop in which these local variables, as they are now, may matter, until :meth:`leave`.

        Raises:
            StateError: something is reachable that cannot be inspected.
        """
        assert self.base is not None, "begin() comes first"
        now = self._surveyor.survey(self._all_roots(), known=self.base)
        functions = [(it.path, it.obj) for it in now if type(it.obj) is types.FunctionType and it.obj not in self.base]
        if functions:  # made since begin(), by code that makes them in every fork, too
            self.base = self.base.joined(self._surveyor.survey(functions, beyond=self.base))
        self._entered = Variables(variables, self._surveyor, self.base)

    def leave(self) -> None:
        self._entered = None

    def capture(
        self, variables: Sequence[Variable] = (), *, but: Callable[[str], bool] = lambda path: False
    ) -> dict[str, Any]:
        """Return everything that training has changed, as a plain state. Its tensors are those in use, not copies. Its
        entry ``locals`` has the changes of local variables and of objects that only local variables reach.

        Args:
            variables: the variables that were given to :meth:`enter`, as they are now.
            but: returns whether the object at a path may be left out if no state can hold it: its owner restores it.

        Raises:
            StateError: something has changed that no state can hold. The message names it.
        """
        base, pristine = self.base, self.pristine
        assert base is not None, "begin() comes first"
        assert pristine is not None
        now = self._surveyor.survey(self._all_roots(), known=base)
        self._watch(now.cached.values())
        for key in now.weak - base.weak:
            raise held_by_nothing(now.records[key].path)
        local = Survey() if self._entered is None else self._entered.survey(variables, now)
        refuse_results_of_state(
            base if self._entered is None else base.joined(self._entered.only_here),
            now.joined(local),
            self._surveyor.reached,
        )
        values: dict[str, Any] = {}
        changed: dict[str, Any] = {}
        refused: list[str] = []
        answered: list[Record] = []
        reached = now.joined(local)
        with plainly():
            encoder = Encoder(base, reached, but)
            for path, record in now.paths.items():
                if record.kind is STORAGE and record.obj not in base and path.rpartition(".")[0] in base.paths:
                    raise StateError(
                        f"{path} has memory that training has hidden, and no state can hold it: keep the tensor as it "
                        f"was made, and show parts of it by views; {excluding(path)}"
                    )
            for record in base:
                present = reached.records.get(id(record.obj))  # perhaps through a local variable alone, by now
                if present is None:
                    if id(record.obj) in reached.referred:
                        refused.append(str(held_by_nothing(record.path)))
                    elif acts_at_end(record.obj, reached):
                        refused.append(str(dropped(record)))
                    continue
                if (why := encoder.other_dict(record)) is not None and not but(record.path):
                    refused.append(why)
                before, content = record.content, present.content
                is_values = record.kind is VALUES
                if is_values and content.plain and (record.obj not in pristine or not content.same(before)):
                    values[record.path] = storable(record.obj)
                    if content is before or content.same_place(before):
                        continue
                if record.obj is settings.SETTINGS:
                    # Only settings that training has changed: the others belong to the process. The number of the next
                    # hook counts only if hooks changed: torch's compiler also registers hooks, an arbitrary number.
                    hooked = any(path.endswith("_hooks") for path in changed) or settings.has_new_handle(reached, base)
                    content = {
                        name: value
                        for name, value in content.items()
                        if not _same(before, content, name) and (hooked or name != NEXT_HOOK)
                    }
                    before = {}
                if content is before or record.kind.same(before, content):
                    continue
                try:
                    changed[record.path] = encoder.content(record, content)
                except StateError as error:
                    if not but(record.path):
                        refused.append(str(error))
                    changed[record.path] = ANSWERED
                    answered.append(record)
            if refused:
                raise StateError(joined(refused))
            encoder.leave(changed, answered)
            own = {} if self._entered is None else self._entered.capture(variables, now, local, encoder)
        return {"values": values, "changed": changed, "memory": encoder.memory} | ({"locals": own} if own else {})

    def load(
        self,
        state: Mapping[str, Any],
        local: Mapping[str, Any] | None = None,
        write: Callable[[dict[str, object], Mapping[str, str]], None] | None = None,
    ) -> None:
        """Restore a captured state, starting from :meth:`begin` or from any training since.

        Objects that a state leaves out stay as their owners left them.

        Args:
            state: what :meth:`capture` returned.
            local: its ``locals``. They are restored if ``write`` is given.
            write: sets local variables, as they were when :meth:`enter` was called; see :meth:`Variables.load`.

        Raises:
            StateError: the state belongs to other code, or no capture has written it.
        """
        base = self.base
        assert base is not None, "begin() comes first"
        entered = None if local is None or write is None else self._entered
        assert entered is not None or local is None or write is None, "enter() comes first"
        with cannot_be_read("the state does not belong to this trainable"):
            changed = state["changed"]
            decoder = Decoder(base, state["memory"])
            decoder.keep(changed)
            self._rewind([path for path, content in changed.items() if is_answered(content)])
            with plainly():
                decoder.fill(state["values"], changed)
                decoder.write_all(changed)
            if entered is not None and local is not None and write is not None:
                entered.load(local, decoder, write)

    def _rewind(self, answered: Collection[str]) -> None:
        """Restore everything as of :meth:`begin`, except values that setup created: the state provides those."""
        assert self.base is not None, "begin() comes first"
        assert self.pristine is not None
        for record in self.base:
            if record.path in answered:
                continue
            values = record.kind is not VALUES or record.obj in self.pristine
            _put_back(record, "a fork would begin with what other training has left", values=values)

    def _watch(self, cached: Iterable[Record]) -> None:
        """Refuse changes of objects in the caches of functions. They are not part of the state, since results must
        depend on arguments alone."""
        for record in cached:
            known = self._cached.get(id(record.obj))
            if known is None:
                content = Marked(record.obj, sampled=True) if record.kind is VALUES else record.content
                self._cached[id(record.obj)] = Record(record.path, record.obj, record.kind, content, record.skip)
            elif known.changed():
                raise StateError(
                    f"{unmarked(record.path)}, which functools.lru_cache keeps, has changed in training, and is in no "
                    f"state: a cached function must depend on its arguments alone. Keep objects that change as "
                    f"attributes of the trainable"
                )

    @contextmanager
    def kept(self, what: str, *, warn: bool = True) -> Iterator[None]:
        """Restore on exit what the code inside the block has changed, so that training does not depend on it.

        Args:
            what: the name of that code in messages.
            warn: whether to log what is restored, once.

        Raises:
            StateError: something cannot be restored. The message names it.
        """
        before = self._surveyor.survey(self._all_roots(), known=self.base)
        guard = Guard([record for record in before if record.kind is VALUES], self.pristine or Survey())
        try:
            yield
        finally:
            for record in before:
                if warn and record.kind not in (VALUES, CACHE, MODULES) and record.changed():
                    self._warn_once(record, what)
                _put_back(record, f"{what} must not change the state", values=record.kind is not VALUES)
            for record in guard.changed():
                if not guard.put_back(record):
                    raise StateError(
                        f"{what} has changed {unmarked(record.path)}, so training would depend on when it is "
                        f"called: restore the old value there, or work on a copy; {excluding(record.path)}"
                    )

    @contextmanager
    def undone(self, what: str, remedy: str, more: Roots = ()) -> Iterator[None]:
        """Restore on exit what the code inside the block has changed, so that training begins as if it had not run.
        Unlike in :meth:`kept`, that includes the caches of functions, from which training would else get results
        instead of computing them.

        Args:
            what: the name of that code in messages.
            remedy: the end of the message if something cannot be restored: what to do then.
            more: further roots.

        Raises:
            StateError: something cannot be restored. The message names it.
        """
        # With a surveyor of its own: each looks into code once, and training's has yet to meet what this code imports.
        before = self.surveyor(self._stateless).survey(chain(self._all_roots(), more), known=self.base)
        records = [*before, *before.cached.values()]
        guard = Guard([record for record in records if record.kind is VALUES], self.pristine or Survey())
        caches = [record for record in records if record.kind is CACHE and is_users_code(record.obj.__wrapped__)]
        results = [dict(results_kept(record.obj) or {}) for record in caches]
        try:
            yield
        finally:
            for record, kept in zip(caches, results, strict=True):
                if record.changed():  # a bounded cache stays empty: what it has kept cannot be restored one by one
                    record.obj.cache_clear()
                    if (present := results_kept(record.obj)) is not None:
                        present.update(kept)
            why = f"has been changed by {what}, and cannot be restored"
            for record in records:
                try:
                    _restore(record, values=record.kind is not VALUES)
                except _CANNOT as error:
                    raise StateError(f"{unmarked(record.path)} {why} ({error}): {remedy}") from None
            for record in guard.changed():
                if not guard.put_back(record):
                    reason = "it is too large to be copied" if record.content.plain else "no state can hold it"
                    raise StateError(f"{unmarked(record.path)} {why} ({reason}): {remedy}")

    def _warn_once(self, record: Record, what: str) -> None:
        """Warn once that a change is undone: it may be a cache that is made again, or something that training needs."""
        if record.path in self._warned:
            return
        present = record.read()
        before, now = dict(record.kind.children(record.content)), dict(record.kind.children(present))
        made = next((label for label in now if label not in before), None)
        if made is not None:
            message = (
                f"{what} has made {unmarked(record.path)}{made}. It is removed again, so that training does not depend "
                f"on it; if it is a cache, make it in dataset() or __init__(), or name it in `stateless`"
            )
        else:
            names = present if record.kind.name == "attributes" else ()
            name = next((name for name in names if not _same(record.content, present, name)), None)
            if name is None or name == "training":  # changes by model.eval() are expected
                return
            message = (
                f"{what} has changed {unmarked(record.path)}.{name}. The change is undone, so that training does not "
                "depend on when it is called. Update values that training uses, such as a scheduler or a best value, "
                f"in a training step"
            )
        self._warned.add(record.path)
        logger.warning("%s", message)

    def sampled(self, known: Survey | None = None) -> Survey:
        """Survey everything as of now, with samples that show whether values change. Unchanged objects have their
        records in ``known``."""
        return self._surveyor.survey(self._all_roots(), known=known, sampled=True)

    def portrait(self, more: Roots = ()) -> dict[str, str]:
        """Describe the present content of everything as short strings, by path. Equal content has equal strings in
        every process.

        Args:
            more: further roots, such as the variables of a running function.
        """
        survey = self._surveyor.survey(chain(self._all_roots(), more), known=self.base)
        self._watch(survey.cached.values())
        shown = (record for record in survey if record.kind is not CACHE and UNKNOWN not in record.path)
        return {path: text for record in shown for path, text in texts_of(record, survey)}

    def contents(self, but: tuple[str, ...]) -> dict[str, Any]:
        """Return the present content of everything, by path: tensors and arrays themselves, all else as strings.

        Args:
            but: names of roots. Objects whose paths begin with these are left out.
        """
        survey = self._surveyor.survey(self._all_roots(), known=self.base)
        found: dict[str, Any] = {}
        for record in survey:
            if record.path.partition(".")[0].partition("[")[0] in but or record.kind is CACHE or UNKNOWN in record.path:
                continue
            found |= {record.path: record.obj} if record.kind is VALUES else dict(texts_of(record, survey))
        return found


def _same(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> bool:
    return name in one and same_value(one[name], other[name])


def _restore(record: Record, *, values: bool = True) -> None:
    """Restore an object as recorded. Without ``values``, restore all of a tensor or array but its values."""
    if not values:
        with plainly():
            record.attach()
            record.content.put_place(record.obj)
    elif record.changed():
        record.restore()


def _put_back(record: Record, why: str, *, values: bool = True) -> None:
    """Restore as :func:`_restore` does, or raise :class:`StateError` with the reason ``why`` it must be restored."""
    try:
        _restore(record, values=values)
    except _CANNOT as error:
        remedy = "Create it in model(), setup() or the training function, which start over for each trial"
        if record.kind.name == "iterator":
            remedy = "Keep a position of your own instead, such as a number"
        raise StateError(
            f"{unmarked(record.path)} has changed and cannot be restored ({error}); {why}. {remedy}; "
            f"{excluding(record.path)}"
        ) from None
