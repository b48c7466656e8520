"""``hpstage check``: checks that a trainable is trained exactly, before a search uses it."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated

import typer

from hpstage.cli import options
from hpstage.cli.naming import send_along, space_named, trainable_named
from hpstage.cli.terminal import columns, echo
from hpstage.errors import UsageError
from hpstage.errors.text import clean, folded
from hpstage.report.files import refusing


def check(
    trainable: options.Trainable,
    space: options.Space,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of the trial.  [default: 8, or up to 19 to reach a change of a schedule]"),
    ] = None,
    forks: Annotated[int, typer.Option(help="Number of random steps at which to fork the trial.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed for drawing the trial and the forks.")] = 0,
    numerics: options.Numerics = None,
    json_file: options.Findings = None,
    quiet: options.Quiet = False,
) -> None:
    """Check that training is exact. A trial that branches at any step then has the same bits as without sharing.

    A random trial of the space is trained straight through for a few steps, and then again: in other processes, with
    other numbers of threads, from states in memory and on disk, after another trial, and evaluated after each step. All
    objects that training can reach are compared after every step. The first difference is reported, with its likely
    cause and the remedy.

    It finds state that is not saved (local variables, objects that a state_dict() omits, iterators, files, caches),
    values that differ between processes (clock, hashes, addresses, entropy, threads, unseeded data) and settings of the
    whole process (numbers of threads, torch's settings). State that hpstage captures by itself is not reported.

    For step backends other than eager, it also compares their first steps with eager ones. Differences beyond rounding
    are refused.

    It trains about ten times --steps, in five processes.

    Exit status: 0 if training is exact, 1 if something differs, is refused or fails, 2 if it could not be checked.

    Examples:

    \b
    hpstage check search.py:Digits search.py:space
    hpstage check search.py:Digits search.py:space --numerics compiled
    hpstage check package.module:trainable package.module:space --steps 4 --json check.json
    """
    from hpstage.checking import check as perform

    try:
        function = space_named(space)
        make = partial(_made, trainable)
        subject = make()
        say = None if quiet else _say
        report = perform(
            subject, function, steps=steps, n_forks=forks, seed=seed, numerics=numerics, say=say, make=make
        )
        if json_file is not None:
            with refusing(json_file, option="--json"):
                json_file.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
    except UsageError as error:
        typer.echo(f"hpstage: {error}", err=True)
        raise typer.Exit(2) from None
    width = columns()
    echo(folded(report.as_text(width), width))
    if not report.ok:
        raise typer.Exit(1)


def _say(line: str) -> None:
    typer.echo(clean(line), err=True)


def _made(trainable: str) -> object:
    made = trainable_named(trainable)
    send_along(trainable)
    return made
