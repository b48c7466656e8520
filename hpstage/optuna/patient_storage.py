"""PatientStorage: an Optuna storage that waits while the underlying storage is temporarily unavailable."""

from __future__ import annotations

import errno
import logging
import re
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import optuna
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from hpstage.errors import StoreError
from hpstage.optuna import private
from hpstage.store.redaction import redacted, shown_cause

logger = logging.getLogger("hpstage")

T = TypeVar("T")
Call = TypeVar("Call", bound=Callable[..., Any])

# Seconds for which a storage may be unavailable: a server restart, a failover, a locked file.
PATIENCE = 600.0
# Shortest and longest seconds between two attempts; doubled after each.
_PAUSES = (0.05, 5.0)
# Share of PATIENCE for which a responding storage may refuse a call: a held lock, a broken connection.
_REFUSALS = 0.1
# Errors that waiting does not resolve.
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
# Messages about a full or read-only disk: of SQLite, PostgreSQL and MySQL.
_FULL = re.compile(r"disk is full|No space left on device|table .* is full|readonly database", re.IGNORECASE)
# System attribute that identifies a trial whose creation was not acknowledged.
_TOKEN = "hpstage:token"


@contextmanager
def patient(study: optuna.Study, *, patience: float = PATIENCE) -> Iterator[None]:
    """Let every user of the study's storage, samplers and callbacks included, wait while it is unavailable."""
    storage = private.storage_of(study)
    if isinstance(storage, InMemoryStorage | PatientStorage):
        yield
        return
    private.cut_torn_line(storage)
    private.use_storage(study, PatientStorage(storage, private.id_of_study(study), patience))
    try:
        yield
    finally:
        private.use_storage(study, storage)


def fail_stale_trials(study: optuna.Study) -> None:
    """Fail trials of Optuna's own loops whose heartbeats have stopped, as ``study.optimize`` does, and call the
    storage's callback, which may queue them again. Trials of a search have no heartbeat: its next call continues them.

    Raises:
        StoreError: the storage is unavailable.
    """
    storage = private.storage_of(study)
    waiting = PatientStorage(storage, private.id_of_study(study), PATIENCE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        waiting.again(lambda _: optuna.storages.fail_stale_trials(study))


def _repeated(method: Call) -> Call:
    """Return a method of PatientStorage that retries an idempotent method of the storage while it is unavailable."""
    name = method.__name__

    def call(self: PatientStorage, *args: Any, **kwargs: Any) -> Any:
        return self.again(lambda storage: getattr(storage, name)(*args, **kwargs))

    return cast(Call, call)


class PatientStorage(BaseStorage):
    """A storage wrapper that retries calls while the storage is unavailable. Each call takes effect once, even if only
    its reply was lost.

    Raises:
        StoreError: the storage is unavailable for ``patience`` seconds, refuses a call for a tenth of that, or cannot
            be written (a full disk); or the study was deleted.
    """

    def __init__(self, storage: BaseStorage, study_id: int, patience: float) -> None:
        self._storage = storage
        self._study_id = study_id
        self._patience = patience
        # The URL of a database, and of a journal on Redis.
        places = (getattr(storage, "url", None), private.url_of_journal(storage))
        self._urls = [place for place in places if isinstance(place, str)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def again(self, work: Callable[[BaseStorage], T]) -> T:
        """Return the result of ``work`` on the underlying storage; it may run more than once."""
        return self._again(lambda: work(self._storage))

    # --- calls that are not idempotent --------------------------------------------------------------------

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        template = create_trial(state=TrialState.RUNNING) if template_trial is None else template_trial
        token = uuid.uuid4().hex
        template.system_attrs = {**template.system_attrs, _TOKEN: token}

        def made() -> int | None:
            trials = self._storage.get_all_trials(study_id, deepcopy=False)
            return next((private.id_of(t) for t in reversed(trials) if t.system_attrs.get(_TOKEN) == token), None)

        return self._once(lambda: self._storage.create_new_trial(study_id, template), made)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        def done() -> bool | None:
            return True if self._storage.get_trial(trial_id).state == state else None

        changed = self._once(lambda: self._storage.set_trial_state_values(trial_id, state, values), done)
        self.get_study_directions(self._study_id)  # a journal accepts trials of a study that was deleted
        return changed

    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        return self._storage.create_new_study(directions, study_name)

    def delete_study(self, study_id: int) -> None:
        self._storage.delete_study(study_id)

    # --- idempotent calls ---------------------------------------------------------------------------------

    set_study_user_attr = _repeated(BaseStorage.set_study_user_attr)
    set_study_system_attr = _repeated(BaseStorage.set_study_system_attr)
    get_study_id_from_name = _repeated(BaseStorage.get_study_id_from_name)
    get_study_name_from_id = _repeated(BaseStorage.get_study_name_from_id)
    get_study_directions = _repeated(BaseStorage.get_study_directions)
    get_study_user_attrs = _repeated(BaseStorage.get_study_user_attrs)
    get_study_system_attrs = _repeated(BaseStorage.get_study_system_attrs)
    get_all_studies = _repeated(BaseStorage.get_all_studies)
    set_trial_param = _repeated(BaseStorage.set_trial_param)
    set_trial_intermediate_value = _repeated(BaseStorage.set_trial_intermediate_value)
    set_trial_user_attr = _repeated(BaseStorage.set_trial_user_attr)
    set_trial_system_attr = _repeated(BaseStorage.set_trial_system_attr)
    get_trial = _repeated(BaseStorage.get_trial)
    get_all_trials = _repeated(BaseStorage.get_all_trials)
    get_trial_id_from_study_id_trial_number = _repeated(BaseStorage.get_trial_id_from_study_id_trial_number)

    def remove_session(self) -> None:
        self._storage.remove_session()

    # --- retries ------------------------------------------------------------------------------------------

    def _once(self, work: Callable[[], T], done: Callable[[], T | None]) -> T:
        """Return the result of ``work``, or the result of ``done`` if a failed attempt took effect nevertheless."""
        failed = False

        def attempt() -> T:
            nonlocal failed
            if failed:
                found = done()
                if found is not None:
                    return found
            try:
                return work()
            except Exception:
                failed = True
                raise

        return self._again(attempt)

    def _again(self, call: Callable[[], T]) -> T:
        def work() -> T:
            try:
                return call()
            except OSError:
                private.cut_torn_line(self._storage)
                raise

        try:
            return work()
        except KeyError as error:
            if private.has_study(self._storage, self._study_id):
                raise
            raise StoreError(
                "the study was deleted from its storage while it was searched; all that was trained is kept: with a "
                "new study on the same store, none of it is trained again"
            ) from error
        except Exception as error:
            if not _may_pass(error):
                raise
            logger.warning(
                "The storage of the study does not answer (%s); waiting for it. Training continues.", self._shown(error)
            )
        began = time.monotonic()
        refused, away = stop_after_delay(_REFUSALS * self._patience), stop_after_delay(self._patience)
        retrying = Retrying(
            retry=retry_if_exception(_may_pass),
            wait=wait_exponential(multiplier=_PAUSES[0], max=_PAUSES[1]),
            stop=lambda state: (refused(state) and self._answers()) or away(state),
            reraise=True,
        )
        try:
            done = retrying(work)
        except Exception as error:
            if not _may_pass(error):
                raise
            answers, waited = self._answers(), f"for {time.monotonic() - began:.0f} s ({self._shown(error)})"
            problem, remedy = "been away", "bring it back"
            if answers:
                problem, remedy = "refused a call", "see its disk, permissions and log"
            raise StoreError(
                f"the study's storage has {problem} {waited}; all that was trained is kept: {remedy}, and run the same "
                f"command again"
            ) from shown_cause(error, *self._urls)
        logger.warning("The storage of the study is back after %.1f s.", time.monotonic() - began)
        return done

    def _shown(self, error: Exception) -> str:
        return f"{type(error).__name__}: {redacted(str(error), *self._urls)}"

    def _answers(self) -> bool:
        """Whether the storage responds to a simple query."""
        try:
            self._storage.get_study_name_from_id(self._study_id)
        except Exception:
            return False
        return True


def _may_pass(error: BaseException) -> bool:
    """Whether the same call may succeed later.

    Raises:
        StoreError: it fails until the user fixes the cause.
    """
    if isinstance(error, UpdateFinishedTrialError | KeyError):
        return False
    why = error.strerror if isinstance(error, OSError) and error.errno in _LASTING else _full(error)
    if why is not None:
        raise StoreError(
            f"the study's storage cannot be written ({why}): fix that and run the same command again; all that was "
            f"trained is kept"
        ) from error
    if isinstance(error, OSError):
        return True
    home = type(error).__module__.partition(".")[0]
    return isinstance(error, StorageInternalError) or home in ("redis", "sqlalchemy", "grpc")


def _full(error: BaseException | None) -> str | None:
    """Return a database's message about a full disk, from an error or its causes."""
    while error is not None:
        if found := _FULL.search(str(error)):
            return found[0]
        error = error.__cause__
    return None
