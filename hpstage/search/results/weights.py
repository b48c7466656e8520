"""The tensors of a saved state by name, and files of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpstage.errors import UsageError
from hpstage.report.files import replacing
from hpstage.training.tensors import named_tensors

if TYPE_CHECKING:
    from torch import Tensor

_MODEL = "model"
_SHOWN = 20


def weights_of(state: object, part: str | None, trial: str) -> dict[str, Tensor]:
    """Return the tensors of ``part`` of a state, without the part's name; see ``TrainedTrial.weights``."""
    from torch import as_tensor

    return {name: as_tensor(leaf) for name, leaf in leaves_of(state, part, trial).items()}


def leaves_of(state: object, part: str | None, trial: str) -> dict[str, Any]:
    """Return the tensors and arrays themselves that :func:`weights_of` returns as tensors."""
    named = dict(named_tensors(state))
    if part is None:
        part = _MODEL if any(name.startswith(f"{_MODEL}.") for name in named) else ""
    prefix = f"{part}." if part else ""
    found = {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
    if not found:
        there = sorted({name.rpartition(".")[0] for name in named} - {""})[:_SHOWN]
        raise UsageError(f"the state of trial {trial} has no tensors of {part!r}; it has {', '.join(there) or 'none'}")
    return found


def write_weights(
    path: str | os.PathLike[str], weights: Mapping[str, Tensor], about: Mapping[str, str], metrics: Mapping[str, float]
) -> None:
    """Write tensors, and what they are, into a safetensors file; its folder is made if needed. Raises ``OSError``."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    metadata = {**{name: repr(value) for name, value in metrics.items()}, **about, "format": "pt"}
    try:
        with replacing(file) as aside:
            save_file({name: value.contiguous() for name, value in weights.items()}, aside, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error
