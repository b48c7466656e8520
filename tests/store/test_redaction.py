"""Passwords, tokens and signatures in URLs are never shown, however they are written and whatever shows them."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import optuna
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpstage.checkpoints import open_checkpoints
from hpstage.cli.studies import open_study
from hpstage.errors import HpstageError
from hpstage.store import RedisJournal
from hpstage.store.opening import open_journal
from hpstage.store.redaction import redacted, shown, shown_cause

# Only secrets have capitals, so that any piece of one is recognised.
SECRET = st.text("ABCXYZ/@?#:%&=+ .\\'\"[]", min_size=1, max_size=12).filter(lambda text: re.search("[A-Z]", text))
SCHEMES = ["redis", "rediss", "postgresql", "mysql+pymysql", "sftp", "s3", "https", "simplecache::sftp"]
NAMES = ["password", "passwd", "token", "secret", "key", "access_key", "sig", "credential", "aws_secret_access_key"]
SHAPES: list[Callable[[str, str, str], str]] = [
    lambda scheme, secret, name: f"{scheme}://me:{secret}@db/x",
    lambda scheme, secret, name: f"{scheme}://:{secret}@head:6379",
    lambda scheme, secret, name: f"{scheme}://{secret}@host",
    lambda scheme, secret, name: f"{scheme}://{secret}@host:99/path/x?prefix=a&mode=b",
    lambda scheme, secret, name: f"{scheme}://host/db?{name}={secret}",
    lambda scheme, secret, name: f"{scheme}://host/db?mode=b&{name}={secret}#there",
    lambda scheme, secret, name: f"{scheme}://me:{secret}@host/db?{name}={secret}",
    lambda scheme, secret, name: f"{scheme}:/me:{secret}@host/db",
    lambda scheme, secret, name: f"{scheme}:{secret}@host",
]


def is_secret_shown(text: str) -> bool:
    return re.search("[A-Z]", text.replace("***", "")) is not None


@example(scheme="postgresql", secret="PA/SS", name="key", shape=SHAPES[0], encoded=False)
@example(scheme="redis", secret="P@SS", name="key", shape=SHAPES[1], encoded=False)
@example(scheme="sftp", secret="SS", name="key", shape=SHAPES[2], encoded=False)
@example(scheme="redis", secret="P@SS", name="password", shape=SHAPES[4], encoded=False)
@example(scheme="redis", secret="1/P@SS", name="password", shape=SHAPES[1], encoded=False)
@example(scheme="redis", secret="A:'A", name="password", shape=SHAPES[0], encoded=False)
@given(
    scheme=st.sampled_from(SCHEMES),
    secret=SECRET,
    name=st.sampled_from(NAMES),
    shape=st.sampled_from(SHAPES),
    encoded=st.booleans(),
)
def test_no_piece_of_a_secret_in_a_url_is_shown(
    scheme: str, secret: str, name: str, shape: Callable[[str, str, str], str], encoded: bool
) -> None:
    written = quote(secret, safe="").lower() if encoded else secret
    written = re.sub("[a-z]", lambda found: found[0].upper(), written) if encoded else written
    url = shape(scheme, written, name)
    assert shown(url).startswith(scheme)
    assert not is_secret_shown(shown(url))
    # What a library may say of it: the URL, the secret, or a piece that it took for something else.
    pieces = [piece for piece in re.split("[/@?#:&=]", secret) if piece]
    # In a token, what stands before a colon may be a user: it is hidden in URLs, and known to be a secret nowhere else.
    clear = ":" not in secret or any(f"{before}{written}" in url for before in ("me:", "//:", "="))
    alone = [secret, repr(secret), quote(secret), *pieces] if clear else []
    for said in (url, repr(url), *alone):
        text = redacted(f"cannot reach '{said}' (port {said}): {said}", url)
        assert not is_secret_shown(text), text
        assert text.startswith("cannot reach ")  # a quotation mark may be taken for a part of the secret


def test_redaction_leaves_locations_without_secrets_readable() -> None:
    for place in (
        "redis://head:6379/3",
        "s3://bucket/folder/with-a_name.x",
        "/a/folder",
        "C:\\folder@home",
        "runs/a@b",
        "sqlite:///studies.db",
        "tcp://10.0.0.1:8786",
        "search.py:space",
    ):
        assert shown(place) == place
        assert redacted(f"there is nothing at {place}, or it is closed", place) == (
            f"there is nothing at {place}, or it is closed"
        )
    assert shown("sftp://user@host/path?timeout=3#x") == "sftp://host/path"
    assert redacted("a user without a password", "redis://user:sesame@host") == "a user without a password"


def test_the_cause_of_an_error_is_shown_unless_it_contains_a_secret() -> None:
    url = "redis://:pa55w0rd@host"
    closed = ValueError("closed")
    assert shown_cause(closed, url) is closed
    closed.__cause__ = OSError(f"no route to {url}")
    assert shown_cause(closed, url) is None


def traceback_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


SECRETS = ["S3CRET/PA55", "S3@CRET#X", "S3?CRET", "12/S3CRET", "S3%2FCRET"]


@pytest.mark.parametrize("secret", SECRETS)
def test_errors_and_logs_of_stores_studies_and_checkpoints_show_no_secret(
    secret: str, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hpstage.store.redis.OPENING", 0.1)
    sampler = optuna.samplers.RandomSampler()
    calls: list[Callable[[], object]] = [
        lambda: RedisJournal(f"redis://:{secret}@127.0.0.1:1", patience=0.1),
        lambda: RedisJournal(f"redis://127.0.0.1:1?password={secret}", patience=0.1),
        lambda: RedisJournal(f"redis://127.0.0.1:1?nonsense={secret}", patience=0.1),
        lambda: RedisJournal(f"redis://{secret}@127.0.0.1:1", patience=0.1),
        lambda: open_journal(f"postgresql://me:{secret}@127.0.0.1/x", closing=ExitStack()),
        lambda: open_journal(f"redis:/me:{secret}@127.0.0.1/x", closing=ExitStack()),
        lambda: open_study("s", f"postgresql://me:{secret}@127.0.0.1:1/x", directions=["minimize"], sampler=sampler),
        lambda: open_study("s", f"sqlite://me:{secret}@127.0.0.1:1/x", directions=["minimize"], sampler=sampler),
        lambda: open_study("s", f"nonsense://me:{secret}@127.0.0.1:1/x", directions=["minimize"], sampler=sampler),
        lambda: open_study("s", f"redis://:{secret}@127.0.0.1:1", directions=["minimize"], sampler=sampler),
        lambda: open_checkpoints(f"nonsense://me:{secret}@host/x", "w"),
        lambda: open_checkpoints(f"sftp://me:{secret}@127.0.0.1:1/x", "w").check(),
        lambda: open_checkpoints(f"file://me:{secret}@host/x", "w"),
    ]
    with caplog.at_level(logging.DEBUG, "hpstage"):
        for call in calls:
            with pytest.raises(HpstageError) as refused:
                call()
            assert not re.search(r"S3|CRET|PA55", traceback_of(refused.value)), traceback_of(refused.value)
    assert not re.search(r"S3|CRET|PA55", caplog.text)


@pytest.mark.ci
@pytest.mark.parametrize("secret", ["S3CRET/PA55", "S3@CRET?X"])
@pytest.mark.parametrize(
    "command",
    [
        "status redis://:{secret}@127.0.0.1:1",
        "status redis://:{secret}@127.0.0.1:1 redis://:{secret}@127.0.0.1:2",
        "status --no-such-option=redis://:{secret}@127.0.0.1:1",
        "status --interval redis://:{secret}@127.0.0.1:1 store",
        "tree postgresql://me:{secret}@127.0.0.1:1/x",
        "report redis://127.0.0.1:1?password={secret}",
        "export redis:/me:{secret}@127.0.0.1:1 tables",
        "gc redis://127.0.0.1:1?prefix=x&password={secret} --checkpoints sftp://{secret}@127.0.0.1:1/x",
        "redis://:{secret}@127.0.0.1:1",
    ],
)
@pytest.mark.one_in(3)
def test_commands_print_no_secret_of_their_arguments(command: str, secret: str, tmp_path: Path) -> None:
    words = [word.format(secret=secret) for word in command.split()]
    done = subprocess.run([sys.executable, "-m", "hpstage", *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0 and done.stderr
    assert not re.search(r"S3|CRET|PA55", done.stdout + done.stderr), done.stderr
