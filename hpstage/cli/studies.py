"""Open or create the Optuna study that a command line names."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpstage.errors import UsageError
from hpstage.errors.text import first_line
from hpstage.store.opening import DEFAULT_ROOT
from hpstage.store.redaction import redacted, shown, shown_cause

if TYPE_CHECKING:
    import optuna

_FILE = "optuna.log"


def default_storage(store: str | None) -> str:
    """Return the default storage of studies: a journal file in the store's folder. The same command thus resumes."""
    folder = Path(DEFAULT_ROOT) if store is None or "://" in store else Path(store)
    return str(folder / _FILE)


def open_study(
    name: str, storage: str, *, directions: Sequence[str], sampler: optuna.samplers.BaseSampler
) -> optuna.Study:
    """Load the study of this name; create it if it does not exist.

    Args:
        storage: a file (Optuna's journal), ``redis://host:6379`` (its journal on Redis) or a database's URL.
        directions: ``minimize`` or ``maximize`` for each objective; may be empty for an existing study.

    Raises:
        UsageError: the storage cannot be opened, a new study has no direction, or an existing study has other
            directions.
    """
    import optuna

    opened = _open(storage)
    if name not in {study.study_name for study in opened.get_all_studies()}:
        if not directions:
            raise UsageError(
                f"there is no study {name!r} in {shown(storage)} yet; create it with --direction minimize or maximize"
            )
        return optuna.create_study(
            study_name=name,
            storage=opened,
            sampler=sampler,
            directions=[optuna.study.StudyDirection[direction.upper()] for direction in directions],
            load_if_exists=True,
        )
    study = optuna.load_study(study_name=name, storage=opened, sampler=sampler)
    own = [direction.name.lower() for direction in study.directions]
    if directions and list(directions) != own:
        raise UsageError(
            f"study {name!r} in {shown(storage)} has the direction {' and '.join(own)}; leave out --direction, or give "
            f"another --study-name"
        )
    return study


def _open(storage: str) -> optuna.storages.BaseStorage:
    from optuna.exceptions import ExperimentalWarning
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend, JournalRedisBackend

    try:
        if re.match("(rediss?|unix)://", storage):
            with warnings.catch_warnings():
                # The user of a command did not choose this class, and cannot change it.
                warnings.simplefilter("ignore", ExperimentalWarning)
                return JournalStorage(JournalRedisBackend(storage))
        if "://" in storage:
            return RDBStorage(storage)
        if os.path.exists(storage) and not os.path.isfile(storage):
            raise OSError("it is not a file")  # opening a pipe would block
        Path(storage).parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFileBackend(storage))
    except Exception as error:  # the driver of a database may raise anything
        reason = redacted(first_line(error), storage)
        raise UsageError(f"--storage {shown(storage)} cannot be opened: {reason}") from shown_cause(error, storage)
