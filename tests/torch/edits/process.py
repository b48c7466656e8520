"""Describes the workloads of many modules and prints what is part of their keys, as JSON.

``python -m tests.torch.edits.process FOLDER``: each module has a trainable ``T``, and may have a function ``undo``.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from hpstage.training.identity.environment import describe
from hpstage.training.trainables import as_trainable


def key_of(name: str) -> object:
    module = importlib.import_module(name)
    try:
        trainable = as_trainable(module.T() if isinstance(module.T, type) else module.T)
        environment = describe(trainable)
        close = getattr(trainable, "close", None)
        if close is not None:
            close()
        return [sorted(environment.described.items()), sorted(environment.identity.items())]
    finally:
        getattr(module, "undo", lambda: None)()
        del sys.modules[name]  # its operators count as long as it is loaded


def main(folder: str) -> None:
    sys.path.insert(0, folder)
    found: dict[str, object] = {}
    for path in sorted(Path(folder).glob("case_*.py")):
        try:
            found[path.stem] = key_of(path.stem)
        except Exception as error:
            found[path.stem] = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
