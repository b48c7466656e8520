"""A net of skorch as a trainable: a step is an epoch.

::

    net = NeuralNetClassifier(Net, max_epochs=20, lr=0.1, iterator_train__shuffle=True)
    trainable = SkorchTrainable(net, X, y)

    def space(trial):
        drop_at = trial.suggest_categorical("drop_at", [10, 15])
        return {"module__width": 32, "lr": s.multistep(0.1, [drop_at], gamma=0.1)}

    hpstage.optimize(study, trainable, space, metric="valid_acc", steps=20)

Needs ``pip install hpstage[skorch]``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from numbers import Real
from typing import Any

import skorch
import torch
from sklearn.base import clone
from skorch import NeuralNet, callbacks
from skorch.callbacks import logging as showing

from hpstage.errors import UsageError
from hpstage.errors.text import AT_FIRST, changed_after
from hpstage.schedule import Scalar
from hpstage.torch import environment
from hpstage.training.capture.kind import Captured
from hpstage.training.run import Run

__all__ = ["SkorchTrainable"]

logger = logging.getLogger("hpstage")

_CLOCK = "epoch_timer", "print_log"
"""Callbacks that every net has: the first measures the seconds of an epoch, the second prints a table."""
_SHOWING = (
    *(callbacks.Checkpoint, callbacks.TrainEndCheckpoint, showing.EpochTimer, showing.MlflowLogger, showing.PrintLog),
    *(showing.NeptuneLogger, showing.ProgressBar, showing.SacredLogger, showing.TensorBoard, showing.WandbLogger),
)
_COUNTS = "epoch", "train_batch_count", "valid_batch_count"
_FIT = "fit", "partial_fit", "fit_loop", "run_single_epoch"


class SkorchTrainable(Captured):
    """Trains a net of skorch, one epoch per step.

    Hyperparameters are the net's parameters by skorch's names. ``lr``, ``optimizer__NAME``, ``batch_size`` and
    ``iterator_train__batch_size`` may follow schedules; others, such as ``module__NAME``, are set when a trial begins.
    ``hpstage.optimize(steps=...)`` replaces ``max_epochs``. The random numbers of an epoch (order of samples, dropout)
    are a function of the hyperparameter ``seed`` (default 0) and the epoch. With the same random numbers, weights and
    history are those of ``net.fit``, bit for bit.

    Metrics are the numbers in the last row of the net's history: ``valid_loss``, ``valid_acc``, and metrics of
    callbacks such as ``EpochScoring``. Callbacks act as under ``fit`` (``LRScheduler``, ``EarlyStopping``, your own);
    callbacks that display or save are left out.

    Args:
        net: a net that has not been trained. Each trial has a clone of it.
        X: the data, as ``net.fit`` takes them. The net's ``train_split`` takes the validation data from them.
        y: the targets, unless they are in ``X``.

    Raises:
        UsageError: the net has a feature that a search does not support, or not exactly; the message names it. Training
            may raise it, too.
    """

    def __init__(self, net: NeuralNet, X: Any, y: Any = None) -> None:
        if not isinstance(net, NeuralNet):
            raise UsageError(f"net is a {type(net).__name__}; it must be a net of skorch, such as NeuralNetClassifier")
        if net.initialized_:
            raise UsageError("net is initialized already, but each trial begins with a new net. Give a new net")
        if net.compile:
            raise UsageError("net has compile=True, which is not supported. Leave it out")
        for name in _FIT:
            owner = next(base for base in type(net).__mro__ if name in vars(base))
            if not owner.__module__.startswith("skorch."):
                raise UsageError(f"{owner.__name__} overrides {name}(); hpstage can only step through skorch's own")
        self.net = clone(net).set_params(callbacks=_used(net.callbacks), verbose=0)
        self.X, self.y = X, y
        self.libraries = {"skorch": skorch.__version__}

    def _unchangeable(self, name: str, hp: Mapping[str, Scalar]) -> str:
        if name == "seed" or _is_live(name):
            return ""
        return AT_FIRST

    def __call__(self, run: Run) -> None:
        initial = dict(run.hp)
        training = _Training(self._made(initial), self.X, self.y)
        run.attach(training=training, model=training.net.module_)
        for _ in run.steps():
            training.follow(run.hp, initial)
            ended = training.epoch()
            run.report(**training.measured())
            if ended:
                run.stop()

    def _made(self, hp: Mapping[str, Scalar]) -> Any:
        net = clone(self.net)
        if "max_epochs" in hp:
            raise UsageError("the space returns 'max_epochs'. A step is an epoch: let it return 'steps' instead")
        try:
            net.set_params(**{name: value for name, value in hp.items() if name != "seed"})
            if net.callbacks != "disable":
                default = dict(net.get_default_callbacks())
                net.set_params(**{f"callbacks__{name}": None for name in _CLOCK if name in default})
            if torch.device(net.device).type == "cuda":
                environment.use_deterministic_algorithms()
            net.initialize()
        except (ValueError, TypeError) as error:
            raise UsageError(f"{type(net).__name__} does not take these hyperparameters: {error}") from error
        return net


class _Training(torch.nn.Module):
    """All objects that training changes. It is a module, so that all objects reachable from it, such as callbacks, are
    captured."""

    def __init__(self, net: Any, X: Any, y: Any) -> None:
        super().__init__()
        self.net = net
        net.notify("on_train_begin", X=X, y=y)
        net.check_data(X, y)
        self.train_data, self.valid_data = net.get_split_datasets(X, y)

    def epoch(self) -> bool:
        """Train an epoch as ``fit_loop`` does. Return whether a callback has ended training."""
        net, data = self.net, {"dataset_train": self.train_data, "dataset_valid": self.valid_data}
        train = net.get_iterator(self.train_data, training=True)
        valid = None if self.valid_data is None else net.get_iterator(self.valid_data, training=False)
        ended = False
        try:
            net.notify("on_epoch_begin", **data)
            net.run_single_epoch(train, training=True, prefix="train", step_fn=net.train_step)
            net.run_single_epoch(valid, training=False, prefix="valid", step_fn=net.validation_step)
            net.notify("on_epoch_end", **data)
        except KeyboardInterrupt:  # callbacks raise it to end training; Ctrl-C raises it in another thread
            ended = True
        for _, callback in net.callbacks_:
            if isinstance(callback, callbacks.EpochScoring):
                callback._initialize_cache()  # drop predictions with their graph; each epoch begins with an empty cache
        return ended

    def measured(self) -> dict[str, float]:
        return {
            name: float(value)
            for name, value in self.net.history[-1].items()
            if isinstance(value, Real) and not isinstance(value, bool) and name not in _COUNTS
        }

    def follow(self, hp: Mapping[str, Scalar], initial: Mapping[str, Scalar]) -> None:
        """Set the parameters that have changed."""
        net = self.net
        for name, value in hp.items():
            if name == "seed" or value == getattr(net, name):
                continue
            if not _is_live(name):
                raise UsageError(changed_after(name, initial[name], value))
            if name.endswith("lr") and any(isinstance(one, callbacks.LRScheduler) for _, one in net.callbacks_):
                raise UsageError(
                    f"{name!r} follows both a schedule and the callback LRScheduler. Leave out one of them"
                )
            net.set_params(**{name: value})


def _is_live(name: str) -> bool:
    return name in ("lr", "batch_size", "iterator_train__batch_size") or name.startswith("optimizer__")


def _used(given: Any) -> Any:
    """Return the callbacks without those that display or save. Refuse callbacks that are not supported."""
    if not isinstance(given, list):
        return given
    return [one for one in given if not _is_left_out(one[1] if isinstance(one, tuple) else one)]


def _is_left_out(callback: Any) -> bool:
    name = type(callback).__name__
    if getattr(callback, "load_best", False):
        raise UsageError(f"the callback {name} has load_best=True. Leave it out; result.best_model() is the best model")
    if isinstance(callback, callbacks.LoadInitState):
        raise UsageError(f"the callback {name} loads the state of another training. Leave it out")
    if isinstance(callback, _SHOWING):
        logger.warning("the callback %s is not used: hpstage itself measures, saves and shows progress", name)
        return True
    return False
