"""Objects that libraries build from the user's code: finds the functions that they wrap, or digests their saved
form."""

from __future__ import annotations

import gc
import io
import re
import sys
import zipfile
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any

from hpstage.training.code.string_digest import hashed

# Numbers that TorchScript gives to classes of the same name, in order of compilation.
_MANGLED = re.compile(rb"[./]___torch_mangle_\d+")
# Files in the saved form that hold source positions, and an id of this copy.
_NO_CONTENT = (".debug_pkl", "serialization_id")


def functions_into(target: Any) -> Iterator[FunctionType]:
    """Yield the functions from which a callable was built: by ``numpy.vectorize``, ``frompyfunc`` or a compiler."""
    if isinstance(target, BuiltinFunctionType | type) or not callable(target):
        return  # not built from functions
    if isinstance(target, FunctionType):  # a library's wrapper holds the functions in its closure
        held = [part for cell in target.__closure__ or () for part in gc.get_referents(cell)]
    else:
        # numpy.frompyfunc keeps the function where only the garbage collector sees it.
        held = [*getattr(target, "__dict__", {}).values(), *gc.get_referents(target)]
        held += [item for table in held if isinstance(table, dict) for item in table.values()]
    yield from dict.fromkeys(part for part in held if isinstance(part, FunctionType))


def is_script(value: object) -> bool:
    """Return whether ``value`` is a function or module in TorchScript."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.jit.ScriptFunction | torch.jit.ScriptModule)


def script_digest(script: Any) -> str:
    """Return a digest of all code, constants and weights of TorchScript, but not of source positions.

    Code that is compiled twice in a process, as when a notebook cell runs again, may have different digests.
    """
    with zipfile.ZipFile(io.BytesIO(script.save_to_buffer())) as saved:
        parts = [
            _MANGLED.sub(b"", part).hex()
            for name in saved.namelist()
            if not name.endswith(_NO_CONTENT)
            for part in (name.encode(), saved.read(name))
        ]
    return hashed(" ".join(parts))
