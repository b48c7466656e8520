"""Removing user attributes and intermediate values of trials, for which Optuna has no method."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage

from hpstage.optuna import private
from hpstage.optuna.patient_storage import PatientStorage


def drop_brought(storage: BaseStorage, trial_id: int, *, names: Sequence[str] = (), steps: Sequence[int] = ()) -> None:
    """Remove user attributes, and intermediate values at ``steps``, of an unfinished trial. A journal cannot: there,
    they become ``None`` and NaN."""
    if not names and not steps:
        return
    if isinstance(storage, PatientStorage):
        storage.again(lambda inner: drop_brought(inner, trial_id, names=names, steps=steps))
    elif (database := private.behind(storage)) is not None:
        drop_brought(database, trial_id, names=names, steps=steps)
    elif isinstance(storage, RDBStorage):
        import sqlalchemy

        attributes, values = private.tables_of_trials()
        with storage.engine.begin() as connection:
            for table, which in ((attributes, attributes.key.in_(names)), (values, values.step.in_(steps))):
                connection.execute(sqlalchemy.delete(table).where(table.trial_id == trial_id, which))
    elif isinstance(storage, InMemoryStorage):
        private.drop_from_memory(storage, trial_id, names, steps)
    else:
        for name in names:
            storage.set_trial_user_attr(trial_id, name, None)
        for step in steps:
            storage.set_trial_intermediate_value(trial_id, step, nan)
