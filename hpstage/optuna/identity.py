"""What names a study among all, whatever its name: given once, to whoever asks first, also when several ask at once."""

from __future__ import annotations

import json
import uuid

from optuna.storages import BaseStorage, RDBStorage, _CachedStorage

from hpstage.optuna.patience import PatientStorage

_ATTRIBUTE = "hpstage:identity"


def study_identity(storage: BaseStorage, study: int) -> str:
    """A text that no other study has."""
    known = _known(storage, study)
    if known is None:
        _propose(storage, study, uuid.uuid4().hex)
        known = _known(storage, study)
        assert known is not None
    return known


def _known(storage: BaseStorage, study: int) -> str | None:
    """Of several proposals the first one holds. Storages but databases have them in their order."""
    attributes = storage.get_study_system_attrs(study)
    return next((str(value) for name, value in attributes.items() if name.startswith(_ATTRIBUTE)), None)


def _propose(storage: BaseStorage, study: int, identity: str) -> None:
    """Optuna's way to set an attribute writes over what another process has set since we looked."""
    if isinstance(storage, PatientStorage):
        storage.again(lambda inner: _propose(inner, study, identity))
    elif isinstance(storage, _CachedStorage):
        _propose(storage._backend, study, identity)
    elif isinstance(storage, RDBStorage):
        _insert(storage, study, identity)
    else:
        storage.set_study_system_attr(study, f"{_ATTRIBUTE}/{identity}", identity)


def _insert(storage: RDBStorage, study: int, identity: str) -> None:
    """In a database a study has an attribute of a name once: of several who insert it, one comes first."""
    import sqlalchemy
    from optuna.storages._rdb.models import StudySystemAttributeModel

    row = {"study_id": study, "key": _ATTRIBUTE, "value_json": json.dumps(identity)}
    try:
        with storage.engine.begin() as connection:
            connection.execute(sqlalchemy.insert(StudySystemAttributeModel).values(**row))
    except sqlalchemy.exc.IntegrityError:
        return
