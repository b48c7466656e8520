"""Files and variables that training reads but that the workload's key does not cover.

The search logs each of them once, and raises an error if its content has changed since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hpstage.errors import StoreError
from hpstage.executor import Executor
from hpstage.plan.facts import InputsRead
from hpstage.plan.messages import Report
from hpstage.plan.plan import SearchPlan

_NAMED = 5
_KINDS = {
    "variable": "the environment variable ",
    "folder": "the folder ",
    "module": "the module ",
    "arguments": "the command line's arguments in ",
    "more": "more files than are compared",
}
_SHARED = "shared "
_of_this_process: set[str] = set()
"""Names of command-line arguments that were logged. All searches of a process share them: only the first logs them."""
_UNLESS = "If training does not depend on it, name it in `stateless`"


def check_inputs(plan: SearchPlan, executor: Executor) -> None:
    """Compare the inputs of a plan with their current content on the executor's workers.

    Raises:
        StoreError: an input has changed since it was read.
    """
    changed = _changed(plan, executor.look_at(tuple(plan.inputs))) if plan.inputs else []
    if changed:
        raise StoreError(
            f"training reads {_listed(changed)}, which changed since this store's results were trained. Restore it, or "
            f"choose another store with store=. {_UNLESS}"
        )


def notices(plan: SearchPlan, reports: Iterable[Report]) -> list[str]:
    """Compare the inputs that workers have read with those of earlier training. Return warnings that name the new ones.

    Raises:
        StoreError: the contents differ.
    """
    known, found = {*plan.inputs}, []
    for report in reports:
        if not isinstance(report, InputsRead):
            continue
        if changed := _changed(plan, report.inputs):
            raise StoreError(
                f"worker {report.worker} has read {_listed(changed)}, with content that differs from what training in "
                f"this store has read before. Give all workers the same content, do not change it while a search runs, "
                f"and choose another store with store=. {_UNLESS}"
            )
        # Missing files are not named: code often looks for files that need not exist.
        names = [name for name, digest in report.inputs.items() if digest and name not in known]
        known.update(names)
        names = [name for name in names if name not in _of_this_process]
        _of_this_process.update(name for name in names if name.startswith("arguments "))
        shared = [name for name in names if name.startswith(_SHARED)]
        if len(names) > len(shared):
            found.append(_notice([name for name in names if name not in shared]))
        if shared:
            found.append(_notice_of_shared(shared))
    return found


def _notice_of_shared(names: list[str]) -> str:
    return (
        f"Training reads {_listed(names)}, which earlier steps have written: it is in no state, so a fork reads the "
        f"content that another trial has written, and retraining does not reveal that. Keep the content in an "
        f"attribute of the trainable; if all trials write the same content, name the file in `stateless`"
    )


def _notice(names: list[str]) -> str:
    return (
        f"Training reads {_listed(names)}, which the workload's key does not cover: once it changes, this store is "
        f"refused. To have it in the key, hold a file's path or a variable's value in an attribute of the trainable, "
        f"parse arguments at module level, import modules by a statement, or state `data_version`. {_UNLESS}"
    )


def _changed(plan: SearchPlan, now: Mapping[str, str]) -> list[str]:
    return [name for name, digest in now.items() if plan.inputs.get(name, digest) != digest]


def _listed(names: list[str]) -> str:
    shown = [_shown(name) for name in names[:_NAMED]]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(shown)}{more}"


def _shown(name: str) -> str:
    kind, _, text = name.partition(" ")
    return f"{_KINDS.get(kind, '')}{text.removeprefix('<code>/')}"
