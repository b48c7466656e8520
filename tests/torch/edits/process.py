"""Describes the workloads of many modules and prints what is part of their keys, as JSON.

``python -m tests.torch.edits.process FOLDER``: each folder in it has a module ``edited``, with a trainable ``T`` and
maybe a function ``undo``. All have one name, as libraries are searched for patches again when there are other modules.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from hpstage.training.identity.environment import describe
from hpstage.training.trainables import as_trainable


def key_of(folder: Path) -> object:
    sys.path.insert(0, str(folder))
    module = importlib.import_module("edited")
    try:
        trainable = as_trainable(module.T() if isinstance(module.T, type) else module.T)
        environment = describe(trainable)
        close = getattr(trainable, "close", None)
        if close is not None:
            close()
        return [sorted(environment.described.items()), sorted(environment.identity.items())]
    finally:
        getattr(module, "undo", lambda: None)()
        del sys.modules["edited"]  # its operators count as long as it is loaded
        sys.path.remove(str(folder))


def main(folder: str) -> None:
    found: dict[str, object] = {}
    for each in sorted(Path(folder).iterdir()):
        try:
            found[each.name] = key_of(each)
        except Exception as error:
            found[each.name] = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
