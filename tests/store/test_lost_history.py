"""A search whose store was put back to an earlier state, and filled again by another, continues from what it holds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving
from hpstage.errors import StoreError
from hpstage.store import RedisJournal
from hpstage.testing.toys import Tape
from tests.invariants import validate
from tests.redis_server import RedisServer

pytestmark = pytest.mark.redis


def space(trial: optuna.Trial) -> dict[str, object]:
    a = s.piecewise({0: trial.suggest_int("a", 1, 2), 6: trial.suggest_int("late", 1, 3)})
    return {"a": a, "b": trial.suggest_float("b", 0.5, 1.0, step=0.5)}


def search(
    name: str, seed: int, store: RedisJournal | None, folder: Path, *callbacks: Callable[..., None]
) -> hpstage.Result:
    return hpstage.optimize(
        optuna.create_study(study_name=name, direction="maximize", sampler=optuna.samplers.RandomSampler(seed=seed)),
        Tape(),
        space,
        metric="score",
        steps=16,
        n_trials=8,
        algorithm=SuccessiveHalving(min_steps=4, reduction_factor=2),
        executor=hpstage.InlineExecutor(),
        store=store if store is not None else folder / name,
        checkpoints=folder / "checkpoints",
        callbacks=callbacks,
    )


def results(study: optuna.Study) -> set[tuple[object, ...]]:
    return {(*sorted(trial.params.items()), trial.state, trial.value) for trial in study.trials}


@pytest.mark.ci
@pytest.mark.parametrize("refilled", [False, True])
def test_a_search_continues_with_correct_results_after_its_redis_store_lost_records(
    redis_server: RedisServer, tmp_path: Path, refilled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    alone = {name: results(search(name, seed, None, tmp_path / "alone").study) for name, seed in (("a", 1), ("b", 2))}
    saved: list[tuple[Path, int]] = []

    def put_back(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if not saved:
            saved.append((redis_server.save(), len(journal)))
        elif len(saved) == 1 and len(journal) > saved[0][1] + 5:
            redis_server.kill()
            redis_server.put_back(saved[0][0])
            redis_server.start()
            saved.append(saved[0])
            if refilled:
                with closing(RedisJournal(redis_server.url)) as other:
                    # What it writes is as long as what was lost, and longer.
                    assert results(search("b", 2, other, tmp_path).study) == alone["b"]

    with closing(RedisJournal(redis_server.url)) as journal, caplog.at_level(logging.WARNING, "hpstage"):
        found = search("a", 1, journal, tmp_path, put_back)
    assert len(saved) == 2
    assert sum("has lost records" in message for message in caplog.messages) == 1
    assert results(found.study) == alone["a"]
    validate(found.plan)
    assert not found.plan.chains and not found.plan.drivers
    assert all(trial.state.is_finished() for trial in found.study.trials)


def test_a_search_raises_an_error_if_its_redis_log_is_trimmed(redis_server: RedisServer, tmp_path: Path) -> None:
    def trim(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        with redis_server.client() as client:
            client.xtrim("{hpstage}:log", maxlen=5)

    with closing(RedisJournal(redis_server.url)) as journal, pytest.raises(StoreError, match="XTRIM"):
        search("a", 1, journal, tmp_path, trim)
