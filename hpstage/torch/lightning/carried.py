"""What of Lightning is carried over, and what is refused by name; the book's page on Lightning has both as a table."""

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
"""Arguments of ``lightning.Trainer`` that have their meaning here."""

_HOLD: Mapping[str, tuple[Any, ...]] = {
    "devices": (1, "auto", [0]),
    "strategy": ("auto",),
    "num_nodes": (1,),
    "logger": (None, False),
    "enable_checkpointing": (None, False),
    "enable_progress_bar": (None, False),
    "enable_model_summary": (None, False),
    "num_sanity_val_steps": (None, 0),
    "deterministic": (None, True),
    "benchmark": (None, False),
    "fast_dev_run": (False,),
    "overfit_batches": (0, 0.0),
    "reload_dataloaders_every_n_epochs": (0,),
    "max_time": (None,),
    "profiler": (None,),
    "barebones": (False,),
    "plugins": (None,),
    "sync_batchnorm": (False,),
}
"""Arguments that say what holds here in any case, if they have one of these values."""

_WHY: Mapping[str, str] = {
    "devices": "a worker trains on one device; start a worker for each",
    "strategy": "a worker trains on one device; start a worker for each",
    "num_nodes": "a worker trains on one device; start a worker for each",
    "logger": "metrics are in the study and in `hpstage report`",
    "enable_checkpointing": "hpstage keeps states; result.best_model() gives the module back",
    "enable_progress_bar": "hpstage.optimize has one",
    "max_time": "what ends trials is not the clock",
    "deterministic": "forks are exact by deterministic algorithms alone",
    "benchmark": "kernels that are chosen by their speed change bits",
    "reload_dataloaders_every_n_epochs": "the data are loaded once",
    "overfit_batches": "use limit_train_batches",
}

_REFUSED: Sequence[tuple[tuple[str, ...], str]] = (
    (("Checkpoint",), "hpstage keeps states; result.best_model() gives the module back"),
    (("Timer",), "what ends trials is not the clock"),
    (("BatchSizeFinder", "LearningRateFinder"), "it fits within a fit; make it a search of its own"),
    (("ProgressBar", "ModelSummary", "LearningRateMonitor", "DeviceStatsMonitor", "ThroughputMonitor"), "leave it out"),
    (("StochasticWeightAveraging",), "it changes the number of epochs and the schedulers; use WeightAveraging"),
)


def checked_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments to pass on to ``lightning.Trainer``.

    Raises:
        UsageError: one of them has no meaning here. It is named.
    """
    for name, value in arguments.items():
        if name in CARRIED or any(value == held and type(value) is type(held) for held in _HOLD.get(name, ())):
            continue
        why = _WHY.get(name, "leave it out")
        raise UsageError(f"trainer: {name}={value!r} is not carried over: {why}")
    interval = arguments.get("val_check_interval")
    if not isinstance(interval, int | float | None):
        raise UsageError(
            f"trainer: val_check_interval={interval!r} goes by the clock; give batches, or a part of an epoch"
        )
    return {name: value for name, value in arguments.items() if name in CARRIED}


def checked_callbacks(callbacks: Sequence[Any]) -> list[Callback]:
    """Return the callbacks. Raises :class:`UsageError` if one of them cannot work here; it is named."""
    for callback in callbacks:
        name = type(callback).__name__
        if not isinstance(callback, Callback):
            raise UsageError(f"trainer: callbacks has a {name}, which is no lightning.pytorch.Callback")
        for names, why in _REFUSED:
            kinds = tuple(getattr(of_lightning, kind) for kind in names if hasattr(of_lightning, kind))
            if isinstance(callback, kinds):
                raise UsageError(f"the callback {name} is not carried over: {why}")
    return list(callbacks)
