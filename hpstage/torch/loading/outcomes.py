"""What loading processes send, batches and the user's errors, and what they do not see: changes of the data set."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Collection
from typing import Any, NoReturn

from hpstage.checkpoints.state_tree import digest
from hpstage.errors import StateError, TrainingError, UsageError
from hpstage.torch.loading.samples import Samples
from hpstage.training.capture.kinds import CACHE, VALUES
from hpstage.training.capture.portrait import texts_of
from hpstage.training.capture.survey import Record, Survey
from hpstage.training.capture.surveyor import Surveyor
from hpstage.training.sample_order import Indices


class Failure:
    """An exception on its way to the training process from one that loads data."""

    def __init__(self, error: Exception) -> None:
        self._traceback = "".join(traceback.format_exception(error))
        self._error: Exception | None = error
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301  # just written
        except Exception:
            self._error = None  # whatever an exception that cannot be pickled raises
        self._text = f"{type(error).__name__}: {error}"

    def raised(self) -> NoReturn:
        error = self._error or TrainingError(self._text)
        error.add_note(f"in a process that loads data:\n{self._traceback}")
        raise error


def see_repeatable(samples: Samples, seed: int, start: int, indices: Indices) -> None:
    """Load a sample twice under the same key.

    Raises:
        UsageError: they differ: the data set depends on what it has loaded before.
    """
    first = indices[:1].tolist()
    try:
        one, other = (digest(samples.made(seed, start, first)) for _ in range(2))
    except StateError:
        return  # no plain values
    if one != other:
        name = type(samples.dataset).__name__
        raise UsageError(
            f"sample {first[0]} of {name} changed when it was loaded again with the same random numbers: it depends on "
            f"the samples loaded before (by a counter, or its own generator), and each process loads only some of "
            f"them. Let {name} be a function of the index and of the global generators (random, NumPy, torch), which "
            f"are seeded before each sample; or load with num_workers = 0, where its changes are part of the state"
        )


def see_plain(batch: Any) -> None:
    """Raise :class:`UsageError` if a batch cannot be sent: torch would wait for it for ever."""
    try:
        pickle.loads(pickle.dumps(batch))  # noqa: S301  # just written
    except Exception as error:
        raise UsageError(
            f"a batch cannot be sent from a worker process of the DataLoader to the training process ({error}): build "
            f"it of tensors, arrays, numbers, and classes of an importable module; or load with num_workers = 0"
        ) from error


class Sent:
    """Values of a data set and of its collate function when worker processes were started.

    Args:
        parts: the objects, by name.
        owner: the trainable, which is not looked into: training changes it.
        stateless: paths to ignore.
    """

    def __init__(self, parts: dict[str, object], owner: object, stateless: Collection[str]) -> None:
        beyond = Survey()
        if owner is not None:
            beyond.records[id(owner)] = None  # type: ignore[assignment]  # only whether it is there counts
        self._then = Surveyor(stateless).survey(parts.items(), beyond=beyond, sampled=True)

    def changed(self) -> Record | None:
        return next((record for record in self._then if record.kind is not CACHE and record.changed()), None)

    def check(self) -> None:
        """Raise :class:`StateError` if anything has changed since."""
        record = self.changed()
        if record is None:
            return
        path = record.path
        if record.kind is not VALUES:
            now = Record(path, record.obj, record.kind, record.read(), record.skip)
            before, after = (dict(texts_of(one, self._then)) for one in (record, now))
            path = next((name for name in (*before, *after) if before.get(name) != after.get(name)), path)
        raise StateError(
            f"training has changed {path}, which the processes that load data ahead do not see: let the data set be a "
            f"function of the index and of the global generators (random, NumPy, torch); or load with num_workers = 0, "
            f"where what training changes is part of the state; if samples do not depend on it, name it in `stateless`"
        )
