"""The origin of a trainable, by which a command can find it later."""

from __future__ import annotations

import os
import sys

from hpstage.training.code.owner import is_users_code
from hpstage.training.identity.code_identity import StandsFor
from hpstage.training.identity.placing import folder_above
from hpstage.training.identity.values import is_function


def origin_of(trainable: object) -> tuple[str, str]:
    """Return the trainable, or its class, as a command line names it, and the folder that this name starts from.

    Both are empty if no name leads to it: it was defined in a notebook or in a function, or its class is a library's.
    """
    if isinstance(trainable, StandsFor):
        trainable = trainable.subject
    target = trainable if is_function(trainable) else type(trainable)
    name = getattr(target, "__qualname__", "<unknown>")
    module = sys.modules.get(getattr(target, "__module__", ""))
    file = getattr(module, "__file__", None)
    if module is None or file is None or "<" in name or not is_users_code(target) or not os.path.isfile(file):
        return "", ""
    dotted = module.__name__ if module.__name__ != "__main__" else getattr(module.__spec__, "name", "")
    is_in_package = "." in dotted or os.path.basename(file) == "__init__.py"
    place = dotted if is_in_package else os.path.basename(file)
    return f"{place}:{name}", folder_above(file, dotted)
