"""The features of Lightning that work, and those that are refused by name. The book's page on Lightning lists both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.callbacks import Callback

from hpstage.errors import UsageError

CARRIED = frozenset(
    (
        *("accelerator", "precision", "max_epochs", "min_epochs", "max_steps", "min_steps"),
        *("limit_train_batches", "limit_val_batches", "val_check_interval", "check_val_every_n_epoch"),
        *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "detect_anomaly"),
        *("inference_mode", "log_every_n_steps"),
    )
)
"""Arguments of ``lightning.Trainer`` that are passed on to it, with their usual meaning."""

_ONE_DEVICE = "a worker trains on one device; start a worker for each"
_LEFT_OUT = "leave it out"
_HOLD: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "devices": ((1, "auto", [0]), _ONE_DEVICE),
    "strategy": (("auto",), _ONE_DEVICE),
    "num_nodes": ((1,), _ONE_DEVICE),
    "logger": ((None, False), "metrics are in the study and in `hpstage report`"),
    "enable_checkpointing": ((None, False), "hpstage keeps states; result.best_model() gives the module back"),
    "enable_progress_bar": ((None, False), "hpstage.optimize has one"),
    "enable_model_summary": ((None, False), _LEFT_OUT),
    "num_sanity_val_steps": ((None, 0), _LEFT_OUT),
    "deterministic": ((None, True), "forks are exact only with deterministic algorithms"),
    "benchmark": ((None, False), "kernels that are selected by timing them change bits"),
    "fast_dev_run": ((False,), _LEFT_OUT),
    "overfit_batches": ((0, 0.0), "use limit_train_batches"),
    "reload_dataloaders_every_n_epochs": ((0,), "the data are loaded once"),
    "max_time": ((None,), "a trial must not end by the clock"),
    "profiler": ((None,), _LEFT_OUT),
    "barebones": ((False,), _LEFT_OUT),
    "plugins": ((None,), _LEFT_OUT),
    "sync_batchnorm": ((False,), _LEFT_OUT),
}
"""Other arguments, each with the values that are accepted, since they describe what hpstage does anyway, and the reason
why all other values are refused."""

_REFUSED: Sequence[tuple[tuple[str, ...], str]] = (
    (("Checkpoint",), "hpstage keeps states; result.best_model() gives the module back"),
    (("Timer",), "a trial must not end by the clock"),
    (("BatchSizeFinder", "LearningRateFinder"), "it trains the model before training; make it a search of its own"),
    (("ProgressBar", "ModelSummary", "LearningRateMonitor", "DeviceStatsMonitor", "ThroughputMonitor"), _LEFT_OUT),
    (("StochasticWeightAveraging",), "it changes the number of epochs and the schedulers; use WeightAveraging"),
)


def checked_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments to pass on to ``lightning.Trainer``.

    Raises:
        UsageError: an argument has a value that is not supported. The message names it.
    """
    for name, value in arguments.items():
        same, why = _HOLD.get(name, ((), _LEFT_OUT))
        if name in CARRIED or any(value == held and type(value) is type(held) for held in same):
            continue
        raise UsageError(f"trainer: {name}={value!r} is not supported: {why}")
    interval = arguments.get("val_check_interval")
    if not isinstance(interval, int | float | None):
        raise UsageError(
            f"trainer: val_check_interval={interval!r} is a time; give a number of batches, or a fraction of an epoch"
        )
    return {name: value for name, value in arguments.items() if name in CARRIED}


def checked_callbacks(callbacks: Sequence[Any]) -> list[Callback]:
    """Return the callbacks. Raise :class:`UsageError`, which names it, if one of them is not supported."""
    for callback in callbacks:
        name = type(callback).__name__
        if not isinstance(callback, Callback):
            raise UsageError(f"trainer: callbacks has a {name}, which is not a lightning.pytorch.Callback")
        for names, why in _REFUSED:
            kinds = tuple(getattr(of_lightning, kind) for kind in names if hasattr(of_lightning, kind))
            if isinstance(callback, kinds):
                raise UsageError(f"the callback {name} is not supported: {why}")
    return list(callbacks)
