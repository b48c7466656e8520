"""Operations for which Optuna has no method: identifying a study, and removing attributes and values of trials."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from math import nan

import optuna
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage

from hpstage.optuna import private
from hpstage.optuna.patient_storage import PatientStorage


def drop_brought(storage: BaseStorage, trial_id: int, *, names: Sequence[str] = (), steps: Sequence[int] = ()) -> None:
    """Remove user attributes, and intermediate values at ``steps``, of an unfinished trial. In a journal, which cannot
    remove them, they become ``None`` and NaN."""
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


_ATTRIBUTE = "hpstage:identity"


def study_identity(storage: BaseStorage, study: int) -> str:
    known = _known(storage, study)
    if known is None:
        _propose(storage, study, uuid.uuid4().hex)
        known = _known(storage, study)
        assert known is not None
    return known


def set_identity(study: optuna.Study, identity: str) -> None:
    """Set the identity of a new study in memory, which must be the same in every process."""
    storage = private.storage_of(study)
    storage.set_study_system_attr(private.id_of_study(study), f"{_ATTRIBUTE}/{identity}", identity)


def _known(storage: BaseStorage, study: int) -> str | None:
    """Return the known identity. Of several proposals the first wins: storages except databases keep their order."""
    attributes = storage.get_study_system_attrs(study)
    return next((str(value) for name, value in attributes.items() if name.startswith(_ATTRIBUTE)), None)


def _propose(storage: BaseStorage, study: int, identity: str) -> None:
    """Propose an identity. Setting an attribute through Optuna would overwrite another process's."""
    if isinstance(storage, PatientStorage):
        storage.again(lambda inner: _propose(inner, study, identity))
    elif (database := private.behind(storage)) is not None:
        _propose(database, study, identity)
    elif isinstance(storage, RDBStorage):
        _insert(storage, study, identity)
    else:
        storage.set_study_system_attr(study, f"{_ATTRIBUTE}/{identity}", identity)


def _insert(storage: RDBStorage, study: int, identity: str) -> None:
    """Insert the attribute. A study in a database has one attribute of each name: the first of several inserts wins."""
    import sqlalchemy

    row = {"study_id": study, "key": _ATTRIBUTE, "value_json": json.dumps(identity)}
    try:
        with storage.engine.begin() as connection:
            connection.execute(sqlalchemy.insert(private.table_of_attributes()).values(**row))
    except sqlalchemy.exc.IntegrityError:
        return
