"""Lost connections, refusals, and what their messages may say: UrlCheckpoints."""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from hpstage.checkpoints import UrlCheckpoints
from hpstage.checkpoints.state_tree import digest
from hpstage.errors import CheckpointError
from hpstage.store.redaction import redacted
from tests.store.url_checkpoints import KEY, OTHER, STATE, names, saved, wrap


class Flaky:
    """Fails each request of the driver so many times before it lets it pass."""

    def __init__(self, patch: pytest.MonkeyPatch, error: Exception, times: int) -> None:
        self.failed: dict[tuple[str, str], int] = {}
        for method in ("pipe_file", "open", "rm_file", "cat_file", "info", "find"):

            def around(call: Callable[[], Any], path: str, method: str = method, **_: Any) -> Any:
                at = (method, path)
                if self.failed.setdefault(at, 0) < times:
                    self.failed[at] += 1
                    raise error
                return call()

            wrap(patch, method, around)


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), TimeoutError(), RuntimeError("a driver's own")])
@pytest.mark.usefixtures("no_pauses")
def test_requests_are_retried_after_an_occasional_loss_of_the_connection(
    store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    flaky = Flaky(monkeypatch, error, times=1)
    store.save(KEY, STATE, step=7, parent=None)
    assert digest(store.load(KEY)) == digest(STATE)
    assert list(store.keys()) == [KEY]
    store.delete(KEY)
    assert names(store) == []
    assert len(flaky.failed) > 5


@pytest.mark.usefixtures("no_pauses")
def test_a_permanently_lost_connection_raises_an_error_with_a_remedy(
    store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(store, OTHER)
    flaky = Flaky(monkeypatch, ConnectionResetError(errno.ECONNRESET, "reset by peer"), times=1000)
    for call in (
        lambda: store.save(KEY, STATE, step=7, parent=None),
        lambda: store.load(OTHER),
        lambda: store.delete(OTHER),
        lambda: list(store.keys()),
        store.usage,
        store.sweep,
        store.check,
    ):
        with pytest.raises(CheckpointError, match=rf"under {store.url}: reset by peer; .*can be reached"):
            call()
    assert max(flaky.failed.values()) <= 30


@pytest.mark.usefixtures("no_pauses")
def test_a_save_succeeds_if_only_the_reply_to_writing_its_manifest_was_lost(
    store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = [True]

    def around(call: Callable[[], Any], path: str, **options: Any) -> Any:
        done = call()
        if options.get("mode") == "create" and lost:
            lost.pop()
            raise ConnectionResetError("reset")
        return done

    wrap(monkeypatch, "pipe_file", around)
    kept = store.save(KEY, STATE, step=7, parent=None)
    assert kept.digest == digest(STATE) == digest(store.load(KEY))
    assert len(names(store)) == 3


@pytest.mark.usefixtures("no_pauses")
def test_files_of_a_checkpoint_are_kept_if_writing_its_manifest_may_have_succeeded(store: UrlCheckpoints) -> None:
    down = False

    def around(call: Callable[[], Any], path: str, **options: Any) -> Any:
        nonlocal down
        done = None if down else call()
        down = down or options.get("mode") == "create"
        if down:
            raise ConnectionResetError("reset")
        return done

    with pytest.MonkeyPatch.context() as patch:
        for method in ("pipe_file", "cat_file"):
            wrap(patch, method, around)
        with pytest.raises(CheckpointError, match="can be reached"):
            store.save(KEY, STATE, step=7, parent=None)
    assert digest(store.load(KEY)) == digest(STATE)


def test_a_permission_error_is_not_retried_and_leaves_no_files(
    store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def around(call: Callable[[], Any], path: str, **options: Any) -> Any:
        tried.append(path)
        if path.endswith("manifest.json"):
            raise PermissionError("Access Denied")
        return call()

    wrap(monkeypatch, "pipe_file", around)
    with pytest.raises(CheckpointError, match=r"Access Denied; see that the credentials are right"):
        store.save(KEY, STATE, step=7, parent=None)
    assert len([path for path in tried if path.endswith("manifest.json")]) == 1
    assert names(store) == []


def test_saving_to_a_full_disk_raises_an_error_with_a_remedy_and_leaves_no_files(
    tmp_path: Path, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    store = UrlCheckpoints(f"file://{tmp_path}", "workload")
    with full_disk(50_000), pytest.raises(CheckpointError, match=rf"{KEY} under .*free space"):
        store.save(KEY, {"w": torch.zeros(100_000)}, step=0, parent=None)
    assert names(store) == []


def test_a_url_without_write_permission_is_named_in_the_error(
    open_folder: Path, unprivileged: Callable[[], AbstractContextManager[None]]
) -> None:
    open_folder.chmod(0o555)
    store = UrlCheckpoints(f"file://{open_folder}", "workload")
    for call in (store.check, lambda: store.save(KEY, STATE, step=0, parent=None)):
        with unprivileged(), pytest.raises(CheckpointError, match=rf"{open_folder}: Permission denied.*credentials"):
            call()
    open_folder.chmod(0o755)
    assert os.listdir(open_folder) == []


def test_missing_parent_folders_of_the_url_are_not_created(tmp_path: Path) -> None:
    store = UrlCheckpoints(f"file://{tmp_path}/mistyped/checkpoints", "workload")
    for call in (store.check, lambda: store.save(KEY, STATE, step=0, parent=None)):
        with pytest.raises(CheckpointError, match="bucket or folder of the URL is there"):
            call()
    assert list(store.keys()) == []
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [
        "denied for AKIA0123 with hunter-2-hunter",
        "GET https://host/bucket/key?X-Amz-Signature=abcdef&sig=hunter-2-hunter refused",
        "cannot reach https://AKIA0123:hunter-2-hunter@host/bucket",
    ],
)
def test_error_messages_and_their_causes_contain_no_credentials(
    place: str, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    options = {"key": "AKIA0123", "client_kwargs": {"endpoint_url": "https://AKIA0123:hunter-2-hunter@host"}}
    store = UrlCheckpoints(
        f"{place}/x", "workload", storage_options={**options, "nested": {"secret": "hunter-2-hunter"}}
    )

    def around(call: Callable[[], Any], path: str, **options: Any) -> Any:
        try:
            raise ValueError(text)
        except ValueError as error:
            raise PermissionError(text) from error

    wrap(monkeypatch, "cat_file", around)
    with pytest.raises(CheckpointError) as caught:
        store.load(KEY)
    shown = "".join(traceback.format_exception(caught.value)) + repr(store) + str(caught.value)
    for secret in ("AKIA0123", "hunter", "abcdef"):
        assert secret not in shown
    assert "refused" in shown or "denied" in shown or "cannot reach" in shown


def test_a_url_is_shown_without_user_and_password() -> None:
    shown = redacted("cannot reach sftp://ann:hunter2@host:22/folder?token=1 at all")
    assert shown == "cannot reach sftp://host:22/folder at all"


def test_the_cause_of_an_error_is_shown_if_it_contains_no_credentials(
    store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = PermissionError("Access Denied")
    wrap(monkeypatch, "cat_file", lambda call, path, **_: raise_it(error))
    with pytest.raises(CheckpointError) as caught:
        store.load(KEY)
    assert caught.value.__cause__ is error


def raise_it(error: Exception) -> None:
    raise error
