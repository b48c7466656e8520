"""The identity of a study, independent of its name. It is assigned on first request, safely under concurrency."""

from __future__ import annotations

import json
import uuid

import optuna
from optuna.storages import BaseStorage, RDBStorage

from hpstage.optuna import private
from hpstage.optuna.patient_storage import PatientStorage

_ATTRIBUTE = "hpstage:identity"


def study_identity(storage: BaseStorage, study: int) -> str:
    """Return a string that is unique to the study."""
    known = _known(storage, study)
    if known is None:
        _propose(storage, study, uuid.uuid4().hex)
        known = _known(storage, study)
        assert known is not None
    return known


def set_identity(study: optuna.Study, identity: str) -> None:
    """Give a new study in memory the identity that it has in every process."""
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
    """Insert the attribute. A database holds one attribute of a name per study: the first of several inserts wins."""
    import sqlalchemy

    row = {"study_id": study, "key": _ATTRIBUTE, "value_json": json.dumps(identity)}
    try:
        with storage.engine.begin() as connection:
            connection.execute(sqlalchemy.insert(private.table_of_attributes()).values(**row))
    except sqlalchemy.exc.IntegrityError:
        return
