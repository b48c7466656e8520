"""``hpstage audit``: trains a trial again without sharing, and compares it with a store or a certificate."""

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
from hpstage.checking.audit import outcome_text
from hpstage.checking.certificate import Certificate
from hpstage.checkpoints import CheckpointStore, FolderCheckpoints
from hpstage.cli import options
from hpstage.cli.naming import recorded, trainable_of
from hpstage.cli.terminal import echo
from hpstage.errors import HpstageError, UsageError
from hpstage.errors.text import clean
from hpstage.execution.retraining import Retrained
from hpstage.plan.log import read_header
from hpstage.plan.messages import Segment
from hpstage.plan.segments import whole
from hpstage.report.files import refusing
from hpstage.search.results import open as open_store
from hpstage.store.opening import open_journal


def audit(
    given: Annotated[
        list[str],
        typer.Argument(
            metavar="STORE [TRAINABLE]",
            help="The store: a folder, or redis://host:6379?prefix=NAME. The trainable: MODULE:NAME, or "
            "path/to/script.py:NAME; needed only if its script is not in this folder. To repeat a certificate, give "
            "the trainable alone.",
        ),
    ],
    trial: options.Trial = None,
    study: options.StudyOfNumber = None,
    certificate: Annotated[
        Path | None,
        typer.Option(
            help="With a store: file to write a certificate to, for another machine to repeat the audit. Without a "
            "store: certificate to repeat."
        ),
    ] = None,
    checkpoints: options.KeptCheckpoints = None,
    json_file: options.Findings = None,
) -> None:
    """Train a trial again without sharing, and compare. It is trained from scratch in a fresh process; its weights and
    metrics must equal those of the search, bit for bit.

    hpstage does not save or restore any state in this training, so the audit also finds state that a search fails to
    capture. If a checkpoint of the trial was deleted, the digest of its state is compared.

    A certificate holds the identity of code and data, the schedules, the environment, and the digests of all saved
    states. On another machine, hpstage audit --certificate FILE MODULE:NAME repeats the training.

    Exit status: 0 if everything is equal, 1 if something differs, 2 if the trial could not be audited.

    Examples:

    \b
    hpstage audit .hpstage/Digits-1f2e3d4c5b6a --trial 3
    hpstage audit STORE search.py:Digits --trial digits/3 --certificate trial-3.json
    hpstage audit --certificate trial-3.json search.py:Digits
    """
    try:
        for option, file in (("--certificate", certificate), ("--json", json_file)):
            if file is not None and not file.name:
                raise UsageError(f"{option} is empty; give the name of a file")
            if file is not None and not file.parent.is_dir():
                raise UsageError(f"{option} {clean(file)}: there is no folder {clean(file.parent)}; give another file")
        with ExitStack() as closing:
            id, segment, found, content = _audited(given, trial, study, certificate, checkpoints, closing)
        if json_file is not None:
            report = {
                "trial": id,
                "equal": found.equal,
                "summary": outcome_text(segment, found, id),
                "captured": segment.captured,
                **msgspec.to_builtins(found),
            }
            with refusing(json_file, option="--json"):
                json_file.write_text(json.dumps(report, indent=2) + "\n")
        if certificate is not None and content is not None and found.equal:
            certificates.write(content, certificate)
    except HpstageError as error:
        typer.echo(f"hpstage: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("hpstage: interrupted before the comparison; the store is unchanged", err=True)
        raise typer.Exit(130) from None
    text = outcome_text(segment, found, clean(id))
    echo(text[0].upper() + text[1:])
    if content is not None:
        echo(f"Certificate: {clean(certificate)}" if found.equal else "No certificate was written.")
    if not found.equal:
        raise typer.Exit(1 if found.apart is not None else 2)


def _audited(
    given: list[str],
    trial: str | None,
    study: str | None,
    certificate: Path | None,
    checkpoints: str | None,
    closing: ExitStack,
) -> tuple[str, Segment, Retrained, Certificate | None]:
    """Return the trial's id, the segment of all its steps, the outcome of the audit, and the certificate to write."""
    if len(given) > 2:
        raise UsageError(f"{' '.join(given[2:])} is one argument too many; give a store and a trainable")
    if certificate is not None and len(given) == 1 and _is_trainable(given[0]):
        if trial is not None or study is not None:
            raise UsageError(
                "a certificate belongs to one trial; leave out --trial and --study, or give the store as well"
            )
        known = certificates.read(certificate)
        nowhere = FolderCheckpoints(closing.enter_context(tempfile.TemporaryDirectory(prefix="hpstage-")), "none")
        segment = known.segment()
        found = _trained(given[0], segment, nowhere, known.described, known.loaded, closing)
        return known.trial, segment, found, None
    plan = open_store(given[0], checkpoints=checkpoints)
    header = read_header(open_journal(given[0], closing=closing, read_only=True))
    planned = (plan.best_trial(study) if trial is None else plan.trial(trial, study)).planned
    if not planned.answered:
        raise UsageError(f"trial {clean(planned.id)} has no result; audit a trial that has one")
    named = given[1] if len(given) == 2 else recorded(header)
    segment = whole(planned)
    found = _trained(named, segment, plan.checkpoints, header.described, header.loaded, closing)
    return planned.id, segment, found, None if certificate is None else certificates.certificate_of(planned, header)


def _trained(
    named: str,
    segment: Segment,
    checkpoints: CheckpointStore,
    described: dict[str, str],
    loaded: dict[str, str],
    closing: ExitStack,
) -> Retrained:
    subject, script = trainable_of(named, loaded, closing)
    return perform(subject, segment, checkpoints, described, loaded, script=script)


def _is_trainable(word: str) -> bool:
    return ":" in word and "://" not in word and not Path(word).is_dir()
