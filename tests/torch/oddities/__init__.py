"""Places for state that one does not think of, each with what becomes of it: captured exactly, or refused by name."""

# ruff: noqa: F401  # each of them notes its own in ODDITIES
from tests.torch.oddities import (
    code,
    containers,
    files,
    foreign,
    harmless,
    hooks,
    instances,
    kept,
    libraries,
    made,
    memory,
    models,
    objects,
    opaque,
    ordinary,
    positions,
    process,
    settings,
    tensors,
    unseen,
    values,
)
from tests.torch.oddities.oddity import ODDITIES, Odd
