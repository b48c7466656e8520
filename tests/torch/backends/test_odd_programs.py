"""What compilers have trouble with is trained by every backend, and forked exactly."""

from __future__ import annotations

import logging
import shutil

import pytest

from tests.torch.backends.forking import by, compiled_of, forks_exactly
from tests.torch.backends.odd_programs import ODD, Printing, Tiny
from tests.torch.trainables import advance, fresh

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")


@pytest.mark.ci
@pytest.mark.parametrize("kind", ODD)
def test_an_unusual_program_forks_exactly_when_trained_eagerly(kind: type[Tiny]) -> None:
    forks_exactly(by("eager", kind))


@needs_compiler
@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.ci
def test_an_unusual_program_forks_exactly_when_compiled(kind: type[Tiny]) -> None:
    forks_exactly(by("compiled", kind))


@pytest.mark.ci
@needs_compiler
def test_a_program_that_cannot_be_compiled_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hpstage"):
        trainable = advance(fresh(by("compiled", Printing)()), 0, 6)
    [warning] = [record.getMessage() for record in caplog.records if "without compiling" in record.getMessage()]
    assert warning.startswith("Printing is trained without compiling it: ")
    assert compiled_of(trainable).compiled == 0
