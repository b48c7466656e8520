"""``hpstage check``: whether a trainable is exact, before a search uses it."""

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
        typer.Option(help="Steps of a trial.  [default: 8, or up to 19 where a schedule changes its form]"),
    ] = None,
    forks: Annotated[int, typer.Option(help="Number of random steps at which to fork the trial.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed for drawing the trial and the forks.")] = 0,
    numerics: Annotated[
        str | None, typer.Option(help="Step backend of a TorchTrainable: eager, compiled, stacked, graphed.")
    ] = None,
    json_file: options.Findings = None,
    quiet: options.Quiet = False,
) -> None:
    """Check that training is exact. Forked anywhere, a trial then has the same bits as without sharing.

    A random trial of the space is trained straight through for a few steps, and again: in other processes, given other
    numbers of threads, from states in memory and on disk, after another trial, evaluated after each step. After every
    step all that training can reach is compared. What differs first is named, with the likely cause and the remedy.

    It names what no state holds (local variables, what a state_dict() leaves out, iterators, files, caches), what is
    another in every process (the clock, hashes and addresses, entropy, threads, unseeded data) and what counts for the
    whole process (numbers of threads, torch's settings). What hpstage captures by itself is exact, and raises no alarm.

    With another step backend than eager, it shows how its first steps compare with eager ones: they agree but for
    rounding, or they are refused by name.

    It trains some ten times --steps, in five processes.

    Exit status: 0 if it is exact, 1 if something differs, is refused or fails, 2 if it could not be checked.

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
