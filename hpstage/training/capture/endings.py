"""Objects whose end runs the user's code. Objects of setup live longer under hpstage, and a fork makes and drops
others: such code would run at other times."""

from __future__ import annotations

import weakref
from typing import Any

from hpstage.training.capture.survey import Survey
from hpstage.training.code.owner import bound_to, is_users_code


def acts_at_end(obj: object, reached: Survey) -> bool:
    """Return whether the end of an object runs the user's code, or a method in C of an object that training reaches:
    by ``__del__``, ``weakref.finalize`` or the callback of a weak reference."""
    if any(is_users_code(vars(kind).get("__del__")) for kind in type(obj).__mro__):
        return True
    callbacks = (_called(reference.__callback__) for reference in weakref.getweakrefs(obj))
    return any(is_users_code(callback) or bound_to(callback) in reached for callback in callbacks)


def _called(callback: Any) -> Any:
    if not isinstance(callback, weakref.finalize):
        return callback
    found = callback.peek()
    return None if found is None else found[1]
