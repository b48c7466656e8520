"""The file of a log: what is damaged is noticed, what is another's is refused, and nothing of it is executed."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstage.checkpoints import FolderCheckpoints
from hpstage.checkpoints.stage_log import Series, StageLog, decode, encode
from hpstage.errors import CheckpointCorrupt, CheckpointForeign, UsageError
from hpstage.plan.facts import StateKey

KEY = StateKey("a" * 32)
LOG = StageLog(3, 7, {"loss": Series([3, 4, 6], [0.5, math.inf, -0.0])}, "printed\n", 12)


@given(st.dictionaries(st.text(), st.lists(st.tuples(st.integers(0, 2**40), st.floats()))), st.text())
def test_an_encoded_stage_log_is_decoded_unchanged(values: dict[str, list[tuple[int, float]]], output: str) -> None:
    series = {name: Series([at for at, _ in points], [v for _, v in points]) for name, points in values.items()}
    log = StageLog(0, 9, series, output)
    assert repr(decode(encode(log, KEY, "w"), KEY, "w", "here")) == repr(log)


def test_decoding_a_stage_log_with_a_changed_byte_or_a_cut_end_raises() -> None:
    content = encode(LOG, KEY, "workload")
    for index in range(len(content)):
        damaged = content[:index] + bytes([content[index] ^ 4]) + content[index + 1 :]
        with pytest.raises((CheckpointCorrupt, CheckpointForeign), match="here"):
            decode(damaged, KEY, "workload", "here")
        with pytest.raises(CheckpointCorrupt, match="here"):
            decode(content[:index], KEY, "workload", "here")


def test_a_stage_log_of_another_state_or_workload_is_refused() -> None:
    content = encode(LOG, KEY, "workload")
    with pytest.raises(CheckpointCorrupt, match="another state"):
        decode(content, StateKey("b" * 32), "workload", "here")
    with pytest.raises(CheckpointForeign, match="belongs to workload workload, not to other"):
        decode(content, KEY, "other", "here")


def test_a_stage_log_whose_steps_and_values_differ_in_length_is_refused() -> None:
    content = msgspec.msgpack.encode({"start": 0, "stop": 1, "series": {"a": {"steps": [0], "values": []}}})
    with pytest.raises(msgspec.ValidationError, match="1 steps, but 0 values"):
        msgspec.msgpack.decode(content, type=StageLog)


@pytest.mark.usefixtures("own_files")
def test_saving_a_stage_log_writes_one_file_and_refuses_keys_that_are_paths(tmp_path: Path) -> None:
    store = FolderCheckpoints(tmp_path / "checkpoints", "workload")
    store.save_log(KEY, LOG)
    assert [str(path.relative_to(store.path)) for path in store.path.rglob("*") if path.is_file()] == [
        f".logs/aa/{KEY}"
    ]
    for key in ("../../etc", "a/b", ".logs"):
        with pytest.raises(UsageError, match="not a state key"):
            store.save_log(StateKey(key), LOG)
