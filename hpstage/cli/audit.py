"""``hpstage audit``: a trial trained again, alone, and compared with what a store or a certificate knows of it."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from hpstage.checking import certificate as certificates
from hpstage.checking.audit import audit as perform
from hpstage.checking.audit import told
from hpstage.checkpoints import CheckpointStore, FolderCheckpoints
from hpstage.cli.naming import send_along, trainable_named
from hpstage.cli.terminal import echo
from hpstage.errors import HpstageError, UsageError
from hpstage.execution.retraining import Retrained, Segment
from hpstage.execution.segments import whole
from hpstage.plan.log import read_header
from hpstage.search.results import open as open_store
from hpstage.store.opening import open_journal
from hpstage.text import clean


def audit(
    given: Annotated[
        list[str],
        typer.Argument(
            metavar="STORE [TRAINABLE]",
            help="The plan: a folder, or redis://host:6379?prefix=NAME; and what was trained: MODULE:NAME, or "
            "path/to/script.py:NAME, if its code is not found by the plan. Of a certificate, the trainable alone.",
        ),
    ],
    trial: Annotated[
        str | None,
        typer.Option(help="Which: STUDY/NUMBER, or a number.", show_default="the best trial of the only study"),
    ] = None,
    study: Annotated[str | None, typer.Option(help="The study that the number is of, if there are several.")] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(help="Write to this file what another machine needs to repeat it; without a store, repeat it."),
    ] = None,
    checkpoints: Annotated[
        str | None, typer.Option(help="Where checkpoints are, if not in the folder: a folder or a URL.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all that was found to this file.")] = None,
) -> None:
    """Train a trial again, alone, from nothing, in a fresh process, and compare its weights and metrics.

    It depends on no list of what training may change: nothing is captured on the way. Where no state of the trial is
    kept any more, it is compared by the digests of its states.

    A certificate holds the identity of code and data, the schedules, the environment, and the digests of all states
    that were kept. On another machine, hpstage audit --certificate FILE MODULE:NAME repeats the training.

    Exit status: 0 if all is equal, 1 if something differs, 2 if it could not be audited.

    Examples:

    \b
    hpstage audit .hpstage/Digits-1f2e3d4c5b6a --trial 3
    hpstage audit STORE search.py:Digits --trial digits/3 --certificate trial-3.json
    hpstage audit --certificate trial-3.json search.py:Digits
    """
    try:
        with ExitStack() as closing:
            id, segment, found = _audited(given, trial, study, certificate, checkpoints, closing)
        if json_file is not None:
            _write(json_file, id, segment, found)
    except HpstageError as error:
        typer.echo(f"hpstage: {error}", err=True)
        raise typer.Exit(2) from None
    text = told(segment, found, clean(id))
    echo(text[0].upper() + text[1:])
    if not found.equal:
        raise typer.Exit(1 if found.apart is not None else 2)


def _audited(
    given: list[str],
    trial: str | None,
    study: str | None,
    certificate: Path | None,
    checkpoints: str | None,
    closing: ExitStack,
) -> tuple[str, Segment, Retrained]:
    """Return the trial's id, all of it, and the outcome of training it again."""
    if len(given) > 2:
        raise UsageError(f"{' '.join(given[2:])} is one argument too many; give a store, and a trainable")
    if certificate is not None and len(given) == 1 and _is_trainable(given[0]):
        if trial is not None or study is not None:
            raise UsageError("a certificate is of one trial; leave --trial and --study out, or give the store as well")
        known = certificates.read(certificate)
        nowhere = FolderCheckpoints(closing.enter_context(tempfile.TemporaryDirectory(prefix="hpstage-")), "none")
        segment = known.segment()
        return known.trial, segment, _trained(given[0], segment, nowhere, known.described, known.loaded)
    plan = open_store(given[0], checkpoints=checkpoints)
    header = read_header(open_journal(given[0], closing=closing, read_only=True))
    planned = (plan.best_trial(study) if trial is None else plan.trial(trial, study)).planned
    if not planned.answered:
        raise UsageError(f"trial {clean(planned.id)} has no result yet, with which to compare; audit one that has")
    if certificate is not None:
        certificates.write(certificates.certificate_of(planned, header), certificate)
    named = given[1] if len(given) == 2 else _found(header.described.get("trainable", ""), header.loaded)
    segment = whole(planned)
    return planned.id, segment, _trained(named, segment, plan.checkpoints, header.described, header.loaded)


def _trained(
    named: str, segment: Segment, checkpoints: CheckpointStore, described: dict[str, str], loaded: dict[str, str]
) -> Retrained:
    subject = trainable_named(named)
    send_along(named)
    return perform(subject, segment, checkpoints, described, loaded)


def _is_trainable(word: str) -> bool:
    return ":" in word and "://" not in word and not Path(word).is_dir()


def _found(name: str, loaded: dict[str, str]) -> str:
    """Return where the code that a plan names is, as the command line names it."""
    for known in loaded:
        module, _, last = known.rpartition(".")
        if last == name and module and module != "__main__":
            return f"{module}:{name}"
    raise UsageError(
        f"the plan does not tell where the code of {clean(name) or 'its trainable'} is; name it after the store: "
        f"MODULE:NAME, or path/to/script.py:NAME"
    )


def _write(file: Path, trial: str, segment: Segment, found: Retrained) -> None:
    report = {
        "trial": trial,
        "equal": found.equal,
        "told": told(segment, found, trial),
        "captured": segment.captured,
        **msgspec.to_builtins(found),
    }
    try:
        file.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise UsageError(
            f"--json {clean(file)} cannot be written: {error.strerror or error}; give another file"
        ) from error
