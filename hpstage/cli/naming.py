"""Import or create the objects named on a command line: a space, a trainable, an algorithm, an executor."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle

from hpstage.cluster.script import as_main, this_script
from hpstage.errors import UsageError
from hpstage.errors.text import clean
from hpstage.plan.facts import PlanCreated
from hpstage.store import plugins

if TYPE_CHECKING:
    from hpstage.algorithm import Algorithm
    from hpstage.executor import Executor
    from hpstage.schedule.space import Space

_T = TypeVar("_T")

# Names of modules that were imported from scripts; another script of the same name may replace them.
_scripts: set[str] = set()


def space_named(reference: str) -> Space:
    """Return the search space that ``reference`` names.

    Raises:
        UsageError: there is no such module or name, or it is not a function.
    """
    space = named(reference, "the space")
    if not callable(space) or isinstance(space, type):
        kind = f"the class {space.__name__}" if isinstance(space, type) else f"of type {type(space).__name__}"
        raise UsageError(f"{reference} is {kind}; name a function that takes an optuna.Trial")
    return space  # type: ignore[no-any-return]


def trainable_named(reference: str, module: ModuleType | None = None) -> object:
    """Return the trainable that ``reference`` names; a class is instantiated without arguments.

    Args:
        module: the named module, if it is imported already.

    Raises:
        UsageError: there is no such module or name, or the class needs arguments.
    """
    subject = named(reference, "the trainable", module)
    if not isinstance(subject, type):
        return subject
    try:
        inspect.signature(subject).bind()
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{reference} is a class that cannot be instantiated without arguments ({error}); name an instance instead"
        ) from None
    return subject()


def named(reference: str, what: str, module: ModuleType | None = None) -> Any:
    """Return the object that ``MODULE:NAME`` or ``path/to/script.py:NAME`` names. Modules of the current folder, or of
    the script's folder, are found.

    Args:
        what: the object in error messages, such as ``"the space"``.
        module: the named module, if it is imported already.

    Raises:
        UsageError: there is no such module or name.
    """
    module_name, name = _parts(reference, what)
    if module is None:
        module = _script(Path(module_name)) if module_name.endswith(".py") else _module(module_name)
    try:
        return attrgetter(name)(module)
    except AttributeError:
        raise UsageError(f"{what} is {reference!r}, but {module_name} has no {name}") from None


def imported_as_main(reference: str, closing: ExitStack) -> ModuleType:
    """Import the module of ``reference`` as ``__main__``, as workers import the script of a search.

    Raises:
        UsageError: there is no such module or script, or importing it exits.
    """
    module_name, _ = _parts(reference, "the trainable")
    if module_name.endswith(".py"):
        file = Path(module_name).resolve()
        if not file.is_file():
            raise UsageError(f"there is no file {file}")
        import_from(file.parent)
        script = {"init_main_from_path": str(file)}
    else:
        _module(module_name.rpartition(".")[0] or module_name)  # the package
        script = {"init_main_from_name": module_name}
    try:
        module = closing.enter_context(as_main(script))
    except SystemExit as leave:
        raise _exits(module_name, leave) from None
    cloudpickle.register_pickle_by_value(module)
    closing.callback(cloudpickle.unregister_pickle_by_value, module)
    return module


def trainable_of(named: str, loaded: Mapping[str, str], closing: ExitStack) -> tuple[object, dict[str, str] | None]:
    """Import the trainable of a plan as the plan's search did. Return it, and how other processes import its script, if
    the trainable was defined in ``__main__``.

    Args:
        named: ``MODULE:NAME`` or ``path/to/script.py:NAME``.
        loaded: digests of the code that the plan was made with, by name.

    Raises:
        UsageError: as in :func:`trainable_named`.
    """
    of_script = any(name.startswith("__main__.") for name in loaded)
    subject = trainable_named(named, imported_as_main(named, closing) if of_script else None)
    send_along(named)
    return subject, this_script() if of_script else None


def recorded(header: PlanCreated) -> str:
    """Return the name of a plan's trainable, to be imported from the current folder.

    Raises:
        UsageError: the plan has recorded no name that can be imported, or its script is not in the current folder.
    """
    name = clean(header.described.get("trainable", ""))
    if not header.origin:
        raise UsageError(
            f"the {name or 'trainable'} of this plan cannot be imported by name: it was defined in a notebook, in a "
            f"function or by a library. Write it into a file, and give its path and name after the store: "
            f"path/to/script.py:{name or 'NAME'}"
        )
    module_name, _, name = header.origin.rpartition(":")
    # A store may come from anybody, and importing runs code: only scripts of the current folder are imported.
    if not module_name.endswith(".py") or (module_name == Path(module_name).name and Path(module_name).is_file()):
        return header.origin
    script = clean(Path(header.folder, module_name))
    raise UsageError(
        f"this plan was made by {script}, which is not in this folder; if you trust this script, give its path after "
        f"the store: {script}:{clean(name)}"
    )


def _parts(reference: str, what: str) -> tuple[str, str]:
    module_name, colon, name = reference.rpartition(":")
    is_script = module_name.endswith(".py")
    if not colon or not name or not module_name or (module_name.startswith(".") and not is_script):
        raise UsageError(f"{what} is {reference!r}; give MODULE:NAME, or path/to/script.py:NAME")
    return module_name, name


def send_along(reference: str) -> None:
    """Have cloudpickle send a script that was named by its path to the workers, which have no module of that name."""
    module_name, _, _ = reference.rpartition(":")
    if module_name.endswith(".py") and Path(module_name).stem in sys.modules:
        cloudpickle.register_pickle_by_value(sys.modules[Path(module_name).stem])


def _script(path: Path) -> Any:
    path = path.resolve()
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    if loaded is not None and path.stem not in _scripts:
        raise UsageError(f"{path} has the name of the imported module {path.stem!r}; rename the script")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    import_from(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # classes of the script are looked up there
    sys.argv[:1] = [str(path)]
    try:
        spec.loader.exec_module(module)
    except SystemExit as leave:
        del sys.modules[path.stem]
        raise _exits(path, leave) from None
    except BaseException:
        del sys.modules[path.stem]
        raise
    _scripts.add(path.stem)
    return module


def _exits(module: object, leave: SystemExit) -> UsageError:
    return UsageError(
        f"{module} exits with status {leave.code} when it is imported. Give its own arguments at the end, after --"
    )


def _module(name: str) -> Any:
    import_from(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but it imports one that does not
        raise UsageError(f"there is no module {name!r}; give a script by its path: path/to/{name}.py") from None


def import_from(folder: Path) -> None:
    """Give modules in a folder precedence over modules of the same name elsewhere."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def algorithm_named(text: str) -> Algorithm:
    """Return the algorithm that a text such as ``SuccessiveHalving(15, 4, tree_aware=False)`` describes.

    Raises:
        UsageError: as in :func:`made`.
    """
    from hpstage.algorithm import Algorithm

    return made(text, "--algorithm", "hpstage.algorithms", Algorithm)  # type: ignore[type-abstract]


def executor_named(text: str) -> Executor:
    """Return the executor that a text such as ``InlineExecutor()`` describes.

    Raises:
        UsageError: as in :func:`made`.
    """
    from hpstage.executor import Executor

    return made(text, "--executor", "hpstage.executors", Executor)  # type: ignore[type-abstract]


def made(text: str, option: str, group: plugins.Group, port: type[_T]) -> _T:
    """Create the object that a text such as ``Name(15, 4)`` describes. Only the named class, a plugin, is called.

    Args:
        option: the option that has the text, for error messages.

    Raises:
        UsageError: the name is unknown or its plugin is broken, an argument is not a literal, or the class rejects the
            arguments.
    """
    try:
        expression = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:  # ValueError: the text is not valid Unicode
        raise UsageError(f"{option} {text!r} cannot be read: {getattr(error, 'msg', error)}") from None
    call = expression if isinstance(expression, ast.Call) else ast.Call(expression, [], [])
    known = plugins.names(group)
    if not isinstance(call.func, ast.Name) or call.func.id not in known:
        raise UsageError(f"{option} {text!r}: give one of {', '.join(known)}, with its arguments in brackets")
    kind = plugins.subclass(group, call.func.id, port)
    try:
        arguments = [ast.literal_eval(argument) for argument in call.args]
        named_arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except ValueError:
        raise UsageError(f"{option} {text!r}: give plain values as arguments, such as 15 or 'asynchronous'") from None
    try:
        return kind(*arguments, **named_arguments)
    except TypeError as error:
        raise UsageError(f"{option} {text!r}: {error}") from None
