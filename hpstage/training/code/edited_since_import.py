"""A check that a module which counts by its source was not edited since it was loaded. What any other edit does:
:mod:`hpstage.training.identity.code_identity`."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

from hpstage.errors import UsageError
from hpstage.training.code import bytecode
from hpstage.training.code.owner import functions_in
from hpstage.training.code.source import is_rewritten


def see_as_written(module: ModuleType, code: CodeType) -> None:
    """Check that the functions of a module are those of its source.

    Args:
        code: compiled from the source as it is now.

    Raises:
        UsageError: the file was edited after it was imported.
    """
    if is_rewritten(module):
        return
    written = {bytecode.digest(part) for part in bytecode.inner(code)}
    for function in _functions_of(module):
        if function.__code__.co_filename == module.__file__ and bytecode.digest(function.__code__) not in written:
            raise UsageError(
                f"{module.__name__}.{function.__qualname__} is not what {module.__file__} says: the file was edited "
                f"after it was imported. Restart this process (the notebook's kernel, the workers), or reload the "
                f"module (importlib.reload)"
            )


def _functions_of(module: ModuleType) -> Iterator[FunctionType]:
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = vars(value).values() if isinstance(value, type) else [value]
        for member in members:
            for part in (member, *functions_in(member)):
                function = part
                while hasattr(function, "__wrapped__"):
                    function = function.__wrapped__
                if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                    yield function
