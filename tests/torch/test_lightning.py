"""Lightning: the user's own LightningModule trains as ``lightning.Trainer`` trains it, and forks at any step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving
from hpstage.checkpoints import FolderCheckpoints
from hpstage.checkpoints.state_tree import clone, digest
from hpstage.errors import NonFiniteLoss, StateError, StopTraining, TrainingError, UsageError
from hpstage.plan.facts import StateKey
from hpstage.schedule import Scalar
from hpstage.testing.trainable import Make, TrainableContract, Values, fresh, outcome, trained
from hpstage.training.identity.code_identity import code_identity
from hpstage.training.step_log import Noted, recording
from hpstage.training.trainables import as_trainable
from hpstage.training.warned import warn_once

pytest.importorskip("lightning")

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging, Timer
from torch.utils.data import DataLoader, Dataset

from hpstage.torch.lightning import LightningTrainable
from tests.torch.lit import (
    BATCH,
    CASES,
    CPU,
    EPOCH,
    HP,
    SAMPLES,
    Case,
    Hooked,
    LitShapes,
    Scheduled,
    ShapesDataModule,
    fitted,
)

pytestmark = [
    pytest.mark.sampled(10),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning 2.6 under torch 2.13
]

FORKS = (3, EPOCH)


def trained_by_lightning(case: Case) -> Any:
    alone, _ = fitted(
        case.module, case.hp, data=case.data(), callbacks=case.callbacks(), **{"max_epochs": 2, **case.trainer}
    )
    return alone


def advanced(subject: object, hp: Mapping[str, Scalar], steps: int) -> Any:
    return trained(fresh(subject, lambda step: hp), lambda step: hp, 0, steps)


def train(trainer: Any, step: int, hp: Mapping[str, Scalar]) -> None:
    with suppress(StopTraining):  # the Trainer's limit
        trainer.train(step, hp)


def assert_equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], where: object) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), (where, name)


class TestContract(TrainableContract):
    """Values change before and after the fork, the batch size in the middle of an epoch."""

    @pytest.fixture
    def make_trainable(self) -> Make:
        return CASES["hooks"].trainable

    @pytest.fixture
    def values_at(self) -> Values:
        return lambda step: {
            "lr": 0.1 if step < 4 else 0.05 if step < 8 else 0.01,
            "batch_size": 8 if step < 3 else 12,
            "seed": 3,
        }


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.ci_one_in(2)
def test_training_equals_that_of_the_lightning_trainer_and_forks_exactly(name: str) -> None:
    case = CASES[name]
    alone = trained_by_lightning(case)
    assert len(alone.weights) >= 6 and alone.metrics
    hp = {**case.hp, "seed": 3}
    trainer: Any = fresh(case.trainable(), lambda step: hp)
    states, digests = {}, {}
    for step, weights in enumerate(alone.weights):
        train(trainer, step, hp)
        assert_equal(weights, trainer._attached["model"].state_dict(), step)
        if step + 1 in alone.metrics:
            assert trainer.evaluate() == alone.metrics[step + 1], step
        digests[step] = digest(trainer.state_dict())
        if step + 1 in FORKS:
            states[step + 1] = clone(trainer.state_dict())
    end = outcome(trainer)
    trainer.close()
    for fork, state in states.items():
        other = fresh(case.trainable(), lambda step: hp)
        other.load_state_dict(state)
        for step in range(fork, len(alone.weights)):
            train(other, step, hp)
            assert digest(other.state_dict()) == digests[step], (fork, step)
        assert outcome(other) == end, fork


@pytest.mark.slow  # tests/dask/test_lightning.py has processes of its own
def test_the_state_of_a_lightning_module_continues_exactly_in_another_process(tmp_path: Path) -> None:
    names, steps = ["hooks", "accumulation and clipping", "plateau of training"], 2 * EPOCH
    store = FolderCheckpoints(tmp_path, "tests")
    ends = []
    for index, name in enumerate(names):
        hp = {**CASES[name].hp, "seed": 3}
        trainer = advanced(CASES[name].trainable(), hp, 3)
        store.save(StateKey(f"{index:032}"), trainer.state_dict(), step=3, parent=None)
        ends.append(outcome(trained(trainer, lambda step, hp=hp: hp, 3, steps)))
    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); import torch; torch.set_num_threads(1)\n"
        "from tests.torch.lit import continued; continued(sys.argv[1], int(sys.argv[2]), sys.argv[3:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(steps), *names],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == repr(ends)


def test_step_unit_epoch_makes_each_lightning_epoch_one_step() -> None:
    alone = trained_by_lightning(CASES["step per epoch"])
    trainable = LightningTrainable(Scheduled, ShapesDataModule(), trainer=CPU, step_unit="epoch")
    trainer: Any = fresh(trainable, lambda step: HP)
    trainer.train(0, HP)
    state = clone(trainer.state_dict())
    # Random numbers are keyed by steps, which are epochs here: dropout differs, and nothing else.
    assert trainer._attached["optimizer"].param_groups[0]["lr"] == 0.05
    assert trainer._attached["fit"].trainer.current_epoch == 1
    assert trainer.evaluate().keys() == alone.metrics[EPOCH].keys()
    end = outcome(trained(trainer, lambda step: HP, 1, 3))
    trainer.close()
    other = fresh(trainable, lambda step: HP)
    other.load_state_dict(state)
    assert outcome(trained(other, lambda step: HP, 1, 3)) == end


# --- a search


def space(trial: optuna.Trial) -> dict[str, object]:
    drop = trial.suggest_categorical("drop", [6, 9])
    return {"lr": s.multistep(trial.suggest_categorical("lr", [0.1, 0.05]), [drop]), "width": 4, "seed": 3}


def search(store: object, **options: Any) -> hpstage.Result:
    study = optuna.create_study(study_name="study", sampler=optuna.samplers.GridSampler(GRID), direction="maximize")
    algorithm = SuccessiveHalving(4, 2)
    trainable = CASES["weight averaging"].trainable()
    return hpstage.optimize(
        study, trainable, space, metric="val_acc", steps=12, n_trials=4, store=store, algorithm=algorithm, **options
    )


GRID = {"drop": [6, 9], "lr": [0.1, 0.05]}


def test_a_search_shares_steps_and_loads_the_lightning_module_of_each_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    result = search(tmp_path / "store", executor=hpstage.InlineExecutor())
    assert result.savings.steps_trained < result.savings.steps_asked
    for trial in result.study.trials:
        loaded = result.load(trial)
        schedules = result.schedules(trial)
        alone = fresh(CASES["weight averaging"].trainable(), lambda step, of=schedules: at(of, step))
        with recording(Noted()) as noted:
            trained(alone, lambda step, of=schedules: at(of, step), 0, loaded.step)
        assert alone.evaluate() == loaded.metrics
        log = result.log(trial).values["train_loss"]
        assert list(log.items()) == list(enumerate(value for name, value in noted.values if name == "train_loss"))
        assert len(log) == loaded.step
        assert_equal(alone._attached["model"].state_dict(), loaded.model.state_dict(), trial.number)  # type: ignore[attr-defined]
        alone.close()  # type: ignore[attr-defined]
    best = result.best_model()
    assert isinstance(best, LitShapes) and not best.training
    assert result.trial(result.best_trial).weights().keys() == best.state_dict().keys()
    averaged = result.trial(result.best_trial).weights(part="callbacks[0]._average_model")
    assert {name.removeprefix("module.") for name in averaged} > best.state_dict().keys()
    assert not list(Path.cwd().iterdir())


def at(schedules: Any, step: int) -> dict[str, Any]:
    return {name: schedule.value(step) for name, schedule in schedules.items()}


# --- values that change


def test_hparams_and_optimizer_fields_follow_the_schedules_of_their_names() -> None:
    class Smoothed(LitShapes):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * self.hparams.scale

        def __init__(self, lr: float, momentum: float, scale: float) -> None:
            super().__init__(lr=lr, momentum=momentum)
            self.save_hyperparameters()

    first = {"lr": 0.1, "scale": 1.0, "momentum": 0.9}
    trainer: Any = fresh(LightningTrainable(Smoothed, ShapesDataModule(), trainer=CPU), lambda step: first)
    for step, scale in enumerate([1.0, 0.5]):
        trainer.train(step, {**first, "scale": scale, "momentum": 0.9 if step == 0 else 0.5})
    model, (group,) = trainer._attached["model"], trainer._attached["optimizer"].param_groups
    assert (model.hparams.scale, group["momentum"], group["lr"]) == (0.5, 0.5, 0.1)


def test_a_schedule_of_lr_is_refused_at_the_step_where_a_scheduler_has_changed_lr() -> None:
    trainer = advanced(CASES["step per epoch"].trainable(), HP, EPOCH + 1)  # lr is 0.05 by now
    with pytest.raises(
        StateError, match=r"lr of param group 0 is 0\.05, but .* was 0\.1: a scheduler of configure_opt"
    ):
        trainer.train(EPOCH + 1, {**HP, "lr": 0.02})


def test_a_search_with_both_a_scheduler_and_a_schedule_of_lr_is_refused_before_training(tmp_path: Path) -> None:
    study = optuna.create_study()
    with pytest.raises(
        UsageError, match=r"set both by the schedule of .* 'lr' and by a StepLR of configure_optimizers\(\)"
    ):
        hpstage.optimize(
            study,
            CASES["step per epoch"].trainable(),
            lambda trial: {**HP, "lr": s.multistep(0.1, [7], gamma=0.1)},
            metric="val_loss",
            steps=10,
            n_trials=40,
            executor=hpstage.InlineExecutor(),
            store=tmp_path,
        )
    assert len(study.trials) < 40
    assert study.trials[0].user_attrs["hpstage:steps"] == 10
    assert hpstage.open(tmp_path).plan.totals.steps_trained == 0


@pytest.mark.filterwarnings("ignore:.*no `validation_step`")
def test_a_hyperparameter_that_no_step_reads_may_not_change() -> None:
    class Fixed(L.LightningModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0].flatten(1)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = advanced(LightningTrainable(Fixed, ShapesDataModule(), trainer=CPU), {"width": 4}, 1)
    with pytest.raises(UsageError, match=r"'width' changes from 4 to 5, but is read only .* in Fixed"):
        trainer.train(1, {"width": 5})
    trainer = advanced(LightningTrainable(Fixed, ShapesDataModule(), trainer=CPU), {"width": 4}, 1)
    with pytest.raises(UsageError, match=r"Fixed has logged no metric"):
        trainer.evaluate()


class Renamed(LitShapes):
    def __init__(self, learning_rate: float, smoothing: float = 0.0) -> None:
        super().__init__(lr=learning_rate)
        self.save_hyperparameters()


def test_a_hyperparameter_named_learning_rate_sets_lr_of_the_optimizer() -> None:
    trainer = advanced(LightningTrainable(Renamed, ShapesDataModule(), trainer=CPU), {"learning_rate": 0.1}, 1)
    trainer.train(1, {"learning_rate": 0.05})
    assert trainer._attached["optimizer"].param_groups[0]["lr"] == 0.05


def test_hyperparameters_without_effect_on_the_module_or_optimizer_are_refused() -> None:
    hp = {"learning_rate": 0.1, "smoothing": 0.0}
    trainer = advanced(LightningTrainable(Renamed, ShapesDataModule(), trainer=CPU), hp, 1)
    with pytest.raises(UsageError, match=r"'smoothing' changes from 0\.0 to 0\.1, but is read only when"):
        trainer.train(1, {**hp, "smoothing": 0.1})
    hp = {"learning_rate": 0.1, "momentum": 0.5}
    with pytest.raises(
        UsageError, match=r"'momentum' is 0\.5, but configure_optimizers\(\) has built .* momentum=0\.9"
    ):
        advanced(LightningTrainable(Renamed, ShapesDataModule(), trainer=CPU), hp, 1)


# --- what is refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"devices": 2}, "devices=2 is not supported: a worker trains on one device"),
        ({"strategy": "ddp"}, "strategy='ddp' is not supported"),
        ({"logger": True}, "logger=True is not supported: metrics are in the study"),
        ({"enable_checkpointing": True}, "hpstage keeps states"),
        ({"max_time": "00:01:00:00"}, "a trial must not end by the clock"),
        ({"val_check_interval": "00:00:01:00"}, "is a time; give a number of batches"),
        ({"gradient_clip_value": 1}, "gradient_clip_value=1 is not supported"),
        ({"callbacks": ModelCheckpoint()}, "the callback ModelCheckpoint is not supported"),
        ({"callbacks": [Timer()]}, "the callback Timer is not supported: a trial must not end by the clock"),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, "use WeightAveraging"),
        ({"callbacks": [print]}, "not a lightning.pytorch.Callback"),
    ],
)
def test_unsupported_arguments_of_the_trainer_are_refused_by_name(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        LightningTrainable(LitShapes, ShapesDataModule(), trainer=arguments)


def test_a_module_instance_instead_of_a_class_and_missing_data_are_refused() -> None:
    with pytest.raises(UsageError, match="pass the class LitShapes"):
        LightningTrainable(LitShapes(), ShapesDataModule())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="pass a datamodule, or train_dataloaders and val_dataloaders"):
        LightningTrainable(LitShapes)
    with pytest.raises(UsageError, match="and not both"):
        LightningTrainable(LitShapes, [], datamodule=ShapesDataModule())


@pytest.mark.parametrize(
    ("hp", "says"),
    [
        ({"lr": 0.1, "momentun": 0.9}, "nothing reads the hyperparameter 'momentun'"),
        ({"lr": 0.1, "batch_size": 2.5}, "'batch_size' is 2.5"),
    ],
)
def test_unknown_or_invalid_hyperparameters_are_refused_by_name(hp: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        advanced(LightningTrainable(LitShapes, ShapesDataModule(), trainer=CPU), hp, 1)


def test_dataloaders_whose_order_hpstage_cannot_decide_are_refused() -> None:
    dataset = list(range(8))
    for loaders, says in (
        (DataLoader(dataset, sampler=[3, 1, 2]), "sampler"),  # type: ignore[arg-type]
        ([DataLoader(dataset)], "it must return one DataLoader"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError, match=says):
            advanced(LightningTrainable(LitShapes, loaders, trainer=CPU), HP, 1)


def test_max_steps_of_the_trainer_ends_training() -> None:
    trainer = advanced(CASES["max_steps"].trainable(), HP, 6)
    with pytest.raises(StopTraining, match=r"Trainer\(max_epochs=-1, max_steps=7\) ends training in step 6"):
        trainer.train(6, HP)
    state = clone(trainer.state_dict())
    other = fresh(CASES["max_steps"].trainable(), lambda step: HP)
    other.load_state_dict(state)
    assert other.evaluate() == trainer.evaluate()
    for each in (trainer, other):
        with pytest.raises(TrainingError, match="there is no step 7 to train"):
            each.train(7, HP)


@pytest.mark.parametrize("step_unit", ["batch", "epoch"])
def test_the_best_model_of_a_trial_that_max_epochs_ended_has_its_saved_weights(step_unit: Any, tmp_path: Path) -> None:
    trainer = {**CPU, "max_epochs": 2}
    result = hpstage.optimize(
        optuna.create_study(study_name="study"),
        LightningTrainable(LitShapes, ShapesDataModule(), trainer=trainer, step_unit=step_unit),
        lambda trial: HP,
        metric="val_loss",
        steps=40,
        n_trials=1,
        executor=hpstage.InlineExecutor(),
        store=tmp_path,
    )
    plan = result.plan
    [state] = [state for state in plan.kept.values() if state.step == plan.trials[result.trial_id(0)].requested]
    assert state.kept is not None and "ends training" in result.study.trials[0].user_attrs["hpstage:ended"]
    kept = result.trial(0).weights()
    loaded = result.best_model().state_dict()
    assert all(torch.equal(kept[name], value) for name, value in loaded.items() if name in kept)


class Stopping(LitShapes):
    def on_train_batch_end(self, *args: Any) -> None:
        self.trainer.should_stop = self.global_step == 4


@pytest.mark.parametrize(
    ("module", "callbacks", "steps"),
    [(Stopping, list, 4), (LitShapes, lambda: [EarlyStopping("val_loss", patience=1)], 15)],
)
def test_should_stop_and_early_stopping_complete_a_trial_at_the_step_of_the_lightning_trainer(
    module: Any, callbacks: Callable[[], list[Any]], steps: int, tmp_path: Path
) -> None:
    trainable = LightningTrainable(module, ShapesDataModule(), trainer={**CPU, "callbacks": callbacks()})
    alone, _ = fitted(module, {"lr": 0.1}, max_epochs=9, callbacks=callbacks())
    assert len(alone.weights) == steps
    study = optuna.create_study(study_name="study")
    result = hpstage.optimize(
        study,
        trainable,
        lambda trial: {"lr": 0.1, "seed": trial.suggest_categorical("seed", [3])},
        metric="val_loss",
        steps=40,
        n_trials=1,
        store=tmp_path,
        executor=hpstage.InlineExecutor(),
    )
    assert [trial.state for trial in study.trials] == [optuna.trial.TrialState.COMPLETE]
    loaded = result.load(0)
    assert loaded.step == steps
    assert_equal(alone.weights[-1], loaded.model.state_dict(), steps)


def test_a_loss_that_is_not_finite_ends_training_unless_terminate_on_nan_is_false() -> None:
    class Exploding(LitShapes):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (float("inf") if batch_idx == 2 else 1)

    with pytest.raises(NonFiniteLoss, match="the training loss is inf in step 2"):
        advanced(LightningTrainable(Exploding, ShapesDataModule(), trainer=CPU), HP, 3)
    advanced(LightningTrainable(Exploding, ShapesDataModule(), trainer=CPU, terminate_on_nan=False), HP, 3)


def test_on_exception_is_called_for_errors_of_the_module_but_not_for_an_abandoned_fit() -> None:
    raised: list[BaseException] = []

    class Listening(L.Callback):
        def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
            raised.append(exception)

    class Failing(LitShapes):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise ZeroDivisionError("mine")
            return super().training_step(batch, batch_idx)

    trainable = LightningTrainable(Failing, ShapesDataModule(), trainer={**CPU, "callbacks": Listening()})
    trainer = advanced(trainable, HP, 1)
    trainer.setup(HP)
    trainer.train(0, HP)
    assert raised == []
    with pytest.raises(ZeroDivisionError, match="mine"):
        trainer.train(1, HP)
    assert [type(error) for error in raised] == [ZeroDivisionError]


def test_code_of_the_module_and_arguments_of_the_trainer_are_in_the_key() -> None:
    def key(module: Any = LitShapes, **arguments: Any) -> Any:
        return code_identity(LightningTrainable(module, ShapesDataModule(), trainer=arguments))

    assert key() == key()
    assert len({str(key()), str(key(Hooked)), str(key(accumulate_grad_batches=2)), str(key(max_steps=5))}) == 4


def test_data_are_in_the_key_and_the_users_data_module_is_not_changed() -> None:
    data = ShapesDataModule()
    before = dict(vars(data))
    described = as_trainable(LightningTrainable(LitShapes, data)).describe_data()  # type: ignore[attr-defined]
    assert vars(data) == before
    other = ShapesDataModule(drop_last=False)
    assert as_trainable(LightningTrainable(LitShapes, other)).describe_data() != described  # type: ignore[attr-defined]
    data.setup("fit")
    loaders = DataLoader(data.train, BATCH, shuffle=True, drop_last=True), DataLoader(data.val, 6)
    advanced(LightningTrainable(LitShapes, *loaders, trainer=CPU), HP, 1)


class Drawn(Dataset[Any]):
    """Each sample draws from a generator of the data set's own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.randn(1, 8, 8, generator=self.generator), index % 3


class CountingDataModule(ShapesDataModule):
    """Its batches depend on how often data to validate by were loaded."""

    loads = 0

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.train = Drawn()  # type: ignore[assignment]

    def val_dataloader(self) -> DataLoader[Any]:
        self.loads += 1
        self.train.generator.manual_seed(self.loads)  # type: ignore[attr-defined]
        return super().val_dataloader()


def test_describing_the_data_for_the_key_does_not_change_training() -> None:
    def trained_on(*, described: bool) -> Any:
        trainable: Any = as_trainable(LightningTrainable(LitShapes, CountingDataModule(), trainer=CPU))
        if described:
            trainable.describe_data()
        trainable.setup(HP)
        trainable.train(0, HP)
        return digest(trainable.state_dict())

    assert trained_on(described=True) == trained_on(described=False)


class Sized(Scheduled):
    """Sizes its scheduler by the trainer."""

    reads = "estimated_stepping_batches"

    def configure_optimizers(self) -> Any:
        total = getattr(self.trainer, type(self).reads)
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class SizedByEpochs(Sized):
    reads = "max_epochs"


class SizedBySteps(Sized):
    reads = "max_steps"


@pytest.mark.parametrize("module", [Sized, SizedByEpochs, SizedBySteps])
def test_a_scheduler_sized_by_a_trainer_without_a_training_length_is_refused_by_name(module: type[Sized]) -> None:
    subject = LightningTrainable(module, ShapesDataModule(), trainer=CPU)
    with pytest.raises(
        UsageError, match=rf"reads trainer\.{module.reads}, but no .* states the length of training.*s\.onecycle"
    ):
        advanced(subject, HP, 1)


class UsesLogger(LitShapes):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.logger.experiment.add_scalar("loss", loss.detach(), self.global_step)
        return loss


def test_calls_of_a_lightning_logger_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    expected = trained_by_lightning(Case())
    warn_once.cache_clear()
    module = fresh(Case(UsesLogger, trainer={"log_every_n_steps": 2}).trainable(), lambda step: HP)
    for step in range(3):
        train(module, step, HP)
    assert_equal(expected.weights[2], module._attached["model"].state_dict(), "with a logger")  # type: ignore[attr-defined]
    assert "UsesLogger or a callback uses a logger of Lightning, but a search has none" in caplog.text
