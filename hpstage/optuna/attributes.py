"""Removing user attributes of trials, for which Optuna has no method."""

from __future__ import annotations

from collections.abc import Sequence

from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage

from hpstage.optuna import private
from hpstage.optuna.patient_storage import PatientStorage


def drop_user_attrs(storage: BaseStorage, trial_id: int, names: Sequence[str]) -> None:
    """Remove user attributes of an unfinished trial. A journal cannot: there, they become ``None``."""
    if not names:
        return
    if isinstance(storage, PatientStorage):
        storage.again(lambda inner: drop_user_attrs(inner, trial_id, names))
    elif (database := private.behind(storage)) is not None:
        drop_user_attrs(database, trial_id, names)
    elif isinstance(storage, RDBStorage):
        import sqlalchemy

        table = private.table_of_user_attributes()
        with storage.engine.begin() as connection:
            connection.execute(sqlalchemy.delete(table).where(table.trial_id == trial_id, table.key.in_(names)))
    elif isinstance(storage, InMemoryStorage):
        private.drop_from_memory(storage, trial_id, names)
    else:
        for name in names:
            storage.set_trial_user_attr(trial_id, name, None)
