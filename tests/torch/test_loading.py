"""Loading by processes: the same bits as in the training process, forked at any step."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
import torch

import hpstage
from hpstage import schedule as s
from hpstage.checkpoints.state_tree import clone, digest
from hpstage.store import MemoryJournal
from hpstage.training.randomness import rekey
from hpstage.training.trainables import as_trainable
from tests.torch.loading import (
    CASES,
    DATA,
    Augmented,
    Loading,
    Watched,
    by_batch,
    pids_of,
    runs,
    with_workers,
)
from tests.torch.trainables import FORK, STEPS, Small, advance, fresh, hp_at, outcome, samples

pytestmark = pytest.mark.sampled(16)

optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.mark.ci
@pytest.mark.parametrize("case", CASES)
@pytest.mark.ci_one_in(2)
def test_loading_processes_give_the_bits_of_the_training_process_also_after_a_fork(case: str) -> None:
    alone = fresh(CASES[case](0))
    states = []
    for step in range(STEPS):
        states.append(clone(alone.state_dict()))
        alone.train(step, hp_at(step))
    expected = outcome(alone)
    alone.close()  # type: ignore[attr-defined]
    loaded = advance(fresh(CASES[case](2)), 0, STEPS)
    assert outcome(loaded) == expected
    processes = pids_of(loaded)
    for fork in (FORK, 1, STEPS - 1):
        loaded.setup(hp_at(0))
        loaded.load_state_dict(states[fork])
        assert outcome(advance(loaded, fork, STEPS)) == expected, fork
    assert pids_of(loaded) == processes, "forks keep the processes"
    loaded.close()  # type: ignore[attr-defined]
    assert not any(map(runs, processes))


def test_random_numbers_of_a_sample_depend_only_on_its_position() -> None:
    def made(batch_sizes: list[int]) -> torch.Tensor:
        trainable: Any = fresh(Loading())
        batches, taken, position = trainable._data(), [], 0
        for size in batch_sizes:
            rekey(len(taken), 17)  # as another step would
            taken.append(batches.take(3, position, size)[0])
            position += size
        return torch.cat(taken)

    assert torch.equal(made([5, 20, 7, 13]), made([40, 5]))
    epochs = made([60])
    assert not torch.equal(epochs[:30].sort(0).values, epochs[30:].sort(0).values), "another epoch, other augmentation"


def test_loading_does_not_change_the_random_numbers_of_training() -> None:
    class Drawing(Loading):
        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            drawn.append(torch.rand(()).item())
            return super().loss(model, batch)

    class Held(Drawing):
        def dataset(self) -> Any:
            return torch.utils.data.TensorDataset(*samples())

    drawn: list[float] = []
    Drawing.stateless = ("drawn",)  # type: ignore[misc]
    advance(fresh(Drawing()), 0, 3)
    augmented, drawn[:] = drawn.copy(), []
    advance(fresh(Held()), 0, 3)
    assert augmented == drawn


def space(trial: optuna.Trial) -> dict[str, Any]:
    drop = trial.suggest_categorical("drop", [3, 5])
    size = trial.suggest_categorical("late", [8, 12])
    batch_size = s.piecewise({0: 8, 4: size})
    return {"lr": s.multistep(0.1, [drop], gamma=0.1), "momentum": 0.9, "batch_size": batch_size, "seed": 3}


def search(trainable: object, **options: Any) -> hpstage.Result:
    grid = {"drop": [3, 5], "late": [8, 12]}
    return hpstage.optimize(
        optuna.create_study(sampler=optuna.samplers.GridSampler(grid, seed=0)),
        trainable,
        space,
        metric="loss",
        steps=8,
        n_trials=4,
        executor=hpstage.InlineExecutor(),
        store=MemoryJournal(),
        **options,
    )


def test_a_search_keeps_its_loading_processes_from_chain_to_chain() -> None:
    trainable = Watched()
    made_by = trainable.made_by
    result = search(trainable, verify="off")
    assert result.savings.steps_asked > result.savings.steps_unique
    assert len(made_by) == 2
    assert not any(map(runs, made_by)), "the processes end with the search"


@pytest.mark.parametrize("make", [lambda count: with_workers(Loading(), count), by_batch])
def test_trials_with_loading_processes_equal_trials_trained_without_sharing(make: Any) -> None:
    result = search(make(2), verify="all")
    for trial in result.study.trials:
        alone: Any = as_trainable(make(0))
        line = {name: schedule.until(8) for name, schedule in result.schedules(trial.number).items()}
        alone.setup({name: schedule.value(0) for name, schedule in line.items()})
        for step in range(8):
            alone.train(step, {name: schedule.value(step) for name, schedule in line.items()})
        assert trial.value == dict(alone.evaluate())["loss"]
        alone.close()


def test_loading_processes_are_restarted_only_if_the_initial_hyperparameters_change() -> None:
    loaded = advance(fresh(by_batch(2)), 0, 2)
    processes = pids_of(loaded)
    loaded.setup(hp_at(0))
    advance(loaded, 0, 2)
    assert pids_of(loaded) == processes
    loaded.setup({**hp_at(0), "lr": 0.2})  # values under which the function may make other data
    loaded.train(0, hp_at(0))
    assert pids_of(loaded) != processes
    loaded.close()  # type: ignore[attr-defined]


def test_loading_processes_end_without_an_error_on_close() -> None:
    """In the main thread, a DataLoader of the user's raises anywhere when a process ends with an error."""
    trainable: Any = advance(fresh(with_workers(Loading(), 2)), 0, 2)
    workers = trainable._data().processes._batches._workers
    trainable.close()
    assert [process.exitcode for process in workers] == [0, 0]


def test_a_data_set_of_tensors_starts_no_loading_processes() -> None:
    trainable: Any = advance(fresh(with_workers(Small(), 4)), 0, 2)
    assert trainable._data().processes is None


def test_a_data_set_has_the_same_samples_each_time_it_is_created() -> None:
    assert digest(DATA.x) == digest(Augmented().x)
