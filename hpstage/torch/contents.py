"""The identity of the data, as far as their content can be read: a text for the key, and a remark for the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

from hpstage.checkpoints.state_tree import digest
from hpstage.errors import StateError, UsageError
from hpstage.errors.text import size
from hpstage.schedule import Scalar
from hpstage.torch.data import Batches
from hpstage.torch.loading.samples import holds
from hpstage.torch.loading.streams import StreamBatches
from hpstage.training.capture.world import Roots, World
from hpstage.training.code.string_digest import hashed
from hpstage.training.identity.files import DataFiles
from hpstage.training.identity.placing import folder_of
from hpstage.training.identity.walk import Walk
from hpstage.training.randomness import Purpose, rekey

SAMPLED = 64
"""Number of samples to inspect. A constant: slow and fast processes must inspect the same samples."""


DRAWS = "samples draw by seed and position"
"""Part of the keys of data whose samples draw random numbers, since older versions of hpstage drew them differently."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The identity of data.

    Attributes:
        text: goes into the key; equal for equal data.
        remark: what the identity is based on.
        warning: a warning that it is based on too little, with the remedy; ``None`` if it is not.
        files: absolute paths of the files that are part of the identity.
        whole: whether all of the data are part of the identity.
    """

    text: str
    remark: str
    warning: str | None = None
    files: frozenset[str] = frozenset()
    whole: bool = True


class NoValues(Mapping[str, Scalar]):
    """Replaces the hyperparameters where none have a value: reading one raises an error with the reason ``why``."""

    def __init__(self, owner: str, why: str) -> None:
        self._owner = owner
        self._why = why

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(f"{self._owner} reads {what}: {self._why}")

    def __getitem__(self, name: str) -> Scalar:
        self._refuse(f"self.hp[{name!r}]")

    def __iter__(self) -> Iterator[str]:
        self._refuse("self.hp")

    def __len__(self) -> int:
        self._refuse("self.hp")

    def __reduce__(self) -> NoReturn:
        self._refuse("self.hp")


Undone = Callable[[], AbstractContextManager[None]]
"""A function that returns a context: on exit, everything that was changed within it is restored."""


def undone_in(world: World, owner: object, more: Callable[[], Roots] = tuple) -> Undone:
    """Return a function that returns a context in which to inspect data. On exit, everything that inspecting changed (a
    counter, a generator, a cache) is restored. So training begins with the data as ``dataset()`` left them, whether or
    not they were inspected (with a ``data_version``, they are not).

    Args:
        owner: the trainable, which errors name.
        more: returns further roots, from which all objects that inspecting may change are found.
    """
    name = type(owner).__name__
    remedy = f"set data_version on {name}, so that they are not looked at, and change it with the data"
    return lambda: world.undone(f"looking at the data of {name} for the key", remedy, more())


def contents_of(
    data: Batches | StreamBatches, made: Mapping[str, object], *, owner: object, undone: Undone
) -> Contents:
    """Return the identity of a data set, and of everything else that decides batches.

    It covers the data set's attributes by value, with the content of tensors, of arrays, and of files that they name
    (parts of large ones). If the user's data set creates samples on request, :data:`SAMPLED` samples are covered, too.

    Args:
        data: the batches of the data set.
        made: the attributes of the trainable that ``dataset()`` has set; usually the data it is evaluated on.
        owner: the trainable, which is not covered: it has another part of the key.
        undone: see :func:`undone_in`.

    Raises:
        UsageError: samples must be inspected, but cannot be hashed.
        StateError: inspecting samples changes an object that cannot be restored.
    """
    name, dataset = type(owner).__name__, data.dataset
    stream = data if isinstance(data, StreamBatches) else None  # of unknown length
    options = {**data.options, **({"draws": DRAWS} if data.draws else {})}
    files = DataFiles()
    walk = Walk(files=files, within=[owner])
    walk.values.folder = folder_of(owner)
    length = None if stream is not None else len(dataset)
    texts = [f"data set {walk.values.content(dataset)}"]
    texts += [f"{what}: {walk.values.content(value)}" for what, value in options.items()]
    held, kept_in_files = walk.values.nbytes, files.nbytes
    computed = not holds(dataset) or bool(walk.values.undigested)
    samples: list[Any] = []
    if computed:
        with undone():  # on exit, the memory of samples that are views is restored: hash them before
            samples = stream.first(SAMPLED) if stream is not None else _samples(dataset, min(SAMPLED, len(dataset)))
            texts.append(f"samples {_digest(samples)}")
    seen = []
    for attribute, value in sorted(made.items()):
        before = walk.values.nbytes, files.nbytes
        texts.append(f"{attribute}={walk.values.content(value)}")
        if (walk.values.nbytes, files.nbytes) != before:
            seen.append(f"self.{attribute}")
    many = "samples of a stream" if length is None else f"{length:,} samples"
    remark = many
    if held or kept_in_files:
        remark += f", {size(held + kept_in_files)} of them digested" + (
            " in parts" if files.sampled or walk.values.sampled else ""
        )
    if computed:
        remark += f", {len(samples)} looked at"
    if seen:
        remark += f"; set by dataset(): {', '.join(seen)}"
    if files.names:
        remark += f"; files: {', '.join(files.names[:5])}" + (" ..." if len(files.names) > 5 else "")
    warning = None
    if computed and not (held or kept_in_files) and len(samples) != length:
        besides = "" if seen else ", and no data that evaluate() uses were seen"
        warning = (
            f"{name}: whether the data are the same as in another run is decided by only {len(samples)} of {many}, "
            f"since {type(dataset).__name__} makes them on request{besides}. Set data_version on {name}, and change it "
            f"with the data"
        )
    text = "\n".join(texts)
    # A `version` that the user states replaces the digest of the data set's code, too.
    stated = getattr(owner, "version", None) is not None
    return Contents(
        f"{length or many} x {hashed(walk.named(text)) if stated else walk.digest(text)}",
        remark,
        warning,
        frozenset(files.places),
        whole=warning is None and not walk.values.undigested,
    )


def _samples(dataset: Any, count: int) -> list[Any]:
    """Return evenly spaced samples."""
    samples = []
    for number in range(count):
        rekey(0, number, Purpose.DATA)
        samples.append(dataset[number * len(dataset) // count])
    return samples


def _digest(samples: list[Any]) -> str:
    try:
        return digest(samples)
    except StateError as error:
        text = Walk().values.exact(samples)
        if text is None:
            raise UsageError(
                f"a sample of the data set cannot be hashed ({error}). Set data_version to a name that you change "
                "when the data change"
            ) from None
        return text
