"""Several writers of one checkpoint behind a URL: second ones, dead ones, living ones."""

from __future__ import annotations

import errno
import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpstage.checkpoints import UrlCheckpoints, url
from hpstage.checkpoints import format as files
from hpstage.checkpoints.state_tree import digest
from hpstage.errors import CheckpointMissing
from tests.store.url_checkpoints import KEY, STATE, Dying, a_day_passes, memory, names, saved, wrap


def before_the_manifest(patch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """``action`` happens when the next writer has written its files, and is about to write the manifest."""
    due = [action]

    def around(call: Callable[[], Any], path: str, **options: Any) -> Any:
        if options.get("mode") == "create" and due:
            due.pop()()
        return call()

    wrap(patch, "pipe_file", around)


def test_a_dead_writer_leaves_a_complete_checkpoint_or_files_that_are_swept(place: str) -> None:
    outcomes = set()
    for requests in range(1, 12):
        store = UrlCheckpoints(f"{place}/{requests}", "workload")
        left = itertools.count(requests, -1)

        def dying(call: Callable[[], Any], *_: Any, left: Iterator[int] = left, **__: Any) -> Any:
            if next(left) <= 0:
                raise Dying
            return call()

        with pytest.MonkeyPatch.context() as patch, suppress(Dying):
            for method in ("pipe_file", "open", "rm_file", "cat_file"):
                wrap(patch, method, dying)
            store.save(KEY, STATE, step=7, parent=None)
        kept = list(store.keys()) == [KEY]
        outcomes.add((kept, len(names(store))))
        assert store.usage().unpublished == 0 or not kept
        assert store.sweep() == 0
        if kept:
            assert digest(store.load(KEY)) == digest(STATE)
        rests = not kept and names(store) != []
        a_day_passes(store)
        assert store.sweep() == rests
        assert len(names(store)) == (3 if kept else 0)
        assert list(store.keys()) == [KEY] * kept
    assert {(False, 0), (False, 1), (False, 2), (True, 3)} == outcomes


def test_sweep_removes_leftover_files_next_to_a_checkpoint_and_keeps_the_checkpoint(store: UrlCheckpoints) -> None:
    manifest = saved(store)["manifest"]
    content = memory.cat_file(manifest)
    memory.rm_file(manifest)
    saved(store)
    assert len(names(store)) == 5
    assert store.sweep() == 0
    a_day_passes(store)
    assert store.sweep() == 1
    assert digest(store.load(KEY)) == digest(STATE)
    assert content != memory.cat_file(manifest)
    assert len(names(store)) == 3


def test_sweep_removes_no_files_next_to_a_damaged_manifest(store: UrlCheckpoints) -> None:
    manifest = saved(store)["manifest"]
    memory.rm_file(manifest)
    memory.pipe_file(saved(store)["manifest"], b"damaged")
    a_day_passes(store)
    assert store.sweep() == 0
    assert len(names(store)) == 5
    store.delete(KEY)
    assert store.sweep() == 2
    assert names(store) == []


def test_the_second_writer_of_a_key_keeps_the_first_checkpoint_and_leaves_no_files(
    place: str, store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    winner = {"a": 1}
    before_the_manifest(monkeypatch, lambda: UrlCheckpoints(place, "workload").save(KEY, winner, step=1, parent=None))
    kept = store.save(KEY, {"a": 2}, step=1, parent=None)
    assert kept.digest == digest({"a": 2}), "of what was trained, for the planner to compare"
    assert store.load(KEY) == winner
    assert len(names(store)) == 3


@pytest.mark.parametrize("action", ["sweep", "delete", "load", "usage"])
def test_a_live_writer_is_not_disturbed_by_sweep_delete_load_or_usage(
    place: str, store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    other = UrlCheckpoints(place, "workload")

    def disturb() -> None:
        with suppress(CheckpointMissing):
            {
                "sweep": other.sweep,
                "delete": lambda: other.delete(KEY),
                "load": lambda: other.load(KEY),
                "usage": other.usage,
            }[action]()

    before_the_manifest(monkeypatch, disturb)
    saved(store)
    assert digest(store.load(KEY)) == digest(STATE)


def test_a_writer_that_was_suspended_for_hours_writes_its_files_again(
    store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights = itertools.chain([0.0, 13 * 3600.0], itertools.repeat(13 * 3600.0))
    written = []
    # This module's clock only: other threads of the process look at the time as well.
    monkeypatch.setattr(url, "time", SimpleNamespace(time=lambda: next(nights), sleep=time.sleep))
    wrap(monkeypatch, "open", lambda call, path, **_: (written.append(path), call())[1])
    saved(store)
    assert sum(path.endswith(".safetensors") for path in written) == 2
    assert digest(store.load(KEY)) == digest(STATE)
    assert len(names(store)) == 3


def test_sweep_keeps_files_of_live_writers_if_the_host_clock_is_years_ahead(
    store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.rm_file(saved(store)["manifest"])
    monkeypatch.setattr(url, "time", SimpleNamespace(time=lambda: 4e9, sleep=time.sleep))
    assert store.sweep() == 0
    assert len(names(store)) == 2


def test_a_manifest_that_is_read_half_written_is_read_again(
    store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(store)["manifest"]
    whole = memory.cat_file(path)
    seen = iter([b"", whole[:50], whole])
    wrap(monkeypatch, "cat_file", lambda call, at, **_: next(seen) if at.endswith(".json") and at == path else call())
    assert store.manifest(KEY).key == KEY


def test_the_first_checkpoint_of_a_key_is_kept_on_a_server_without_conditional_writes(
    place: str, store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def around(call: Callable[[], Any], path: str, **options: Any) -> Any:
        if options.get("mode") == "create":
            raise OSError(errno.ENOSYS, "A header you provided implies functionality that is not implemented")
        return call()

    wrap(monkeypatch, "pipe_file", around)
    first = store.save(KEY, {"a": 1}, step=1, parent=None)
    assert store.save(KEY, {"a": 1}, step=1, parent=None) == first
    assert store.save(KEY, {"a": 2}, step=1, parent=None).digest == digest({"a": 2})
    assert digest(store.load(KEY)) == first.digest
    assert store.load(KEY) == {"a": 1}
    with pytest.raises(FileExistsError):
        store._place(KEY).write_new(files.MANIFEST, b"other")
    assert len(names(store)) == 3


def test_saving_a_state_leaves_no_references_to_it(store: UrlCheckpoints) -> None:
    """Of 10 GB, not when the garbage is collected: no error that is kept may hold the frames of ``save``."""
    state = torch.zeros(3)
    last = weakref.ref(state)
    gc.disable()
    try:
        store.save(KEY, {"w": state}, step=1, parent=None)
        del state
        assert last() is None
    finally:
        gc.enable()
