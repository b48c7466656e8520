"""What decides training in the data, as far as it can be seen: a string for the key, and a remark for the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from hpstage.checkpoints.state_tree import digest
from hpstage.errors import StateError, UsageError
from hpstage.schedule import Scalar
from hpstage.text import size
from hpstage.training.identity.files import DataFiles
from hpstage.training.identity.hashing import hashed
from hpstage.training.identity.walk import Walk
from hpstage.training.randomness import Purpose, rekey

_SAMPLED = 64
"""Number of samples to inspect. The same in every process: it must not depend on how fast that is."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What was seen of the data.

    Attributes:
        text: goes into the key; equal for equal data.
        remark: what the identity of the data is based on.
        warning: that this is little, and what to do; ``None`` if it is enough.
    """

    text: str
    remark: str
    warning: str | None = None


class NoValues(Mapping[str, Scalar]):
    """Replaces the hyper-parameters where there are none: reading them raises an error that says ``why``."""

    def __init__(self, owner: str, why: str) -> None:
        self._owner = owner
        self._why = why

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(f"{self._owner} reads {what}: {self._why}")

    def __getitem__(self, name: str) -> Scalar:
        self._refuse(f"self.hp[{name!r}]")

    def __contains__(self, name: object) -> bool:
        self._refuse(f"self.hp[{name!r}]")

    def __iter__(self) -> Iterator[str]:
        self._refuse("self.hp")

    def __len__(self) -> int:
        self._refuse("self.hp")

    def __bool__(self) -> bool:
        self._refuse("self.hp")

    def __reduce__(self) -> NoReturn:
        self._refuse("self.hp")


def contents_of(dataset: Any, made: Mapping[str, object], *, owner: object) -> Contents:
    """Describe the content of a data set.

    All bytes of tensors and arrays count, files that its attributes name, and its other attributes by value. If a data
    set of the user's own creates samples on request, 64 of them count.

    Args:
        dataset: map-style, with ``__len__``.
        made: the attributes of the trainable that ``dataset()`` has set; usually the data it is evaluated on.
        owner: the trainable, which counts separately.

    Raises:
        UsageError: samples must be inspected, but have no digest.
    """
    name = type(owner).__name__
    files = DataFiles()
    walk = Walk(files=files, within=[owner])
    length = len(dataset)
    texts = [f"data set {walk.values.content(dataset)}"]
    held, kept_in_files = walk.values.nbytes, files.nbytes
    computed = not _holds(dataset) or bool(walk.values.undigested)
    looked_at = min(_SAMPLED, length)
    if computed:
        texts.append(f"samples {_samples(dataset, looked_at)}")
    seen = []
    for attribute, value in sorted(made.items()):
        before = walk.values.nbytes, files.nbytes
        texts.append(f"{attribute}={walk.values.content(value)}")
        if (walk.values.nbytes, files.nbytes) != before:
            seen.append(f"self.{attribute}")
    remark = f"{length:,} samples"
    if held or kept_in_files:
        remark += f", {size(held + kept_in_files)} of them digested" + (
            " in parts" if files.sampled or walk.values.sampled else ""
        )
    if computed:
        remark += f", {looked_at} looked at"
    if seen:
        remark += f"; set by dataset(): {', '.join(seen)}"
    if files.names:
        remark += f"; files: {', '.join(files.names[:5])}" + (" ..." if len(files.names) > 5 else "")
    warning = None
    if computed and not (held or kept_in_files):
        besides = "" if seen else ", and no data that evaluate() uses were seen"
        warning = (
            f"{name}: that the data are the same as in another run is told by {looked_at} of {length:,} samples alone, "
            f"since {type(dataset).__name__} makes them when they are asked for{besides}. State data_version on "
            f"{name}, and change it with the data"
        )
    text = "\n".join(texts)
    # A stated version replaces the code of the data set, too.
    stated = getattr(owner, "version", None) is not None
    return Contents(f"{length} x {hashed(walk.named(text)) if stated else walk.digest(text)}", remark, warning)


def _holds(dataset: Any) -> bool:
    """Return whether samples are parts of what it holds. Types must match exactly: a subclass may do anything."""
    if type(dataset) is Subset:
        return _holds(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_holds, dataset.datasets))
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return all(map(_holds, parts.values() if isinstance(parts, dict) else parts))
    return type(dataset) in (TensorDataset, torch.Tensor, np.ndarray, list, tuple)


def _samples(dataset: Any, count: int) -> str:
    """Return a digest of evenly spaced samples."""
    samples = []
    for number in range(count):
        rekey(0, number, Purpose.DATA)
        samples.append(dataset[number * len(dataset) // count])
    try:
        return digest(samples)
    except StateError as error:
        text = Walk().values.exact(samples)
        if text is None:
            raise UsageError(
                f"a sample of the data set cannot be digested ({error}): state data_version, a name that you change "
                "when the data change"
            ) from None
        return text
