"""Kinds of opaque objects that hold no state of training, each with the reason.

Any other opaque object is refused by name: kinds without a state are listed, never kinds with one.
"""

from __future__ import annotations

import re
from typing import Any

from hpstage.training.code.owner import by_type, module_of

WITHOUT_STATE = {
    "PyCapsule": "a pointer that C code hands on to C code",
    "torch._dynamo.eval_frame.DynamoTLS": "what torch traces at this moment",
    "weakref": "leads to an object that is surveyed where it is held",
    "_ctypes": "functions of libraries in C; arrays of ctypes expose their memory, which is compared",
    "_cffi_backend.Lib": "functions of a library in C",
    "_cffi_backend.FFI": "declarations of types",
    "_cffi_backend.CType": "a declaration of a type",
    "_struct.Struct": "a format, which never changes",
    "torch.finfo": "limits of a type, which never change",
    "torch.iinfo": "limits of a type, which never change",
    "cv2": "operations on images that are given",
    "lmdb": "data in a file, read by keys that are given",
    "numba": "compiled code",
    "PIL": "images in a data set",
    "builtins.ImagingCore": "pixels of a Pillow image; for up to 1 MiB, a checksum is compared",
    "pandas._libs.internals.BlockValuesRefs": "which tables share memory until one of them is written to",
    "pyarrow": "data that never change",
    "rasterio.io.DatasetReader": "data in a file, read at positions that are given",
    "zarr": "data in a file, read at positions that are given",
}
"""The reasons, by package, or by module and class."""
_MOVES = re.compile(r"File|Reader|Stream|Cursor|Iterator|Writer|Capture|Decoder")


@by_type
def has_no_state(kind: Any) -> bool:
    """Return whether instances of a class written in C are known to hold no state. A class whose name implies a
    position in a file or stream has a state, unless the class itself is listed."""
    for base in kind.__mro__[:-1]:
        module, name = module_of(base), base.__name__
        if name in WITHOUT_STATE or f"{module}.{name}" in WITHOUT_STATE:
            return True
        if module.partition(".")[0] in WITHOUT_STATE:
            return not any(_MOVES.search(part.__name__) for part in kind.__mro__)
    return False
