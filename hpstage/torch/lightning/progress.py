"""The state of Lightning's Trainer in a fit: the progress of its loops, its flags, and the logged values."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer

from hpstage.training.step_log import log

_CLOCKS = ("_last_val_time", "_train_start_time")
_PLAIN = (type(None), bool, int, float, str)
_HOLD = (list, dict, tuple)
_LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_METRIC = ("value", "cumulated_batch_size", "_forward_cache", "_computed", "_update_count", "has_reset")
"""Attributes that change from batch to batch, of the object in which Lightning holds the values logged under a name."""


class Progress:
    """The progress of a Trainer that waits for a batch. Another Trainer that also waits for one can continue from it.

    A checkpoint of Lightning restarts ``fit``, which skips the remaining hooks of the epoch and forgets logged values.
    Here both Trainers are paused at the same line of code, so that counters, flags, logged values, and the containers
    that callbacks have set on the Trainer are sufficient.

    Args:
        own: names of the attributes that Lightning gave the Trainer.
    """

    def __init__(self, trainer: Trainer, own: Collection[str]) -> None:
        self._trainer: Any = trainer
        self._own = own
        self._base = {name: _flags(obj) for name, obj in self._parts()}
        self._log_as_well()

    def _parts(self) -> Iterator[tuple[str, Any]]:
        trainer = self._trainer
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        yield from (("trainer", trainer), ("fit", fit), ("epoch", epoch), ("validation", epoch.val_loop))
        yield from (("automatic", epoch.automatic_optimization), ("manual", epoch.manual_optimization))
        yield from (("logged", trainer._logger_connector), ("fetcher", fit._data_fetcher))
        yield "batches", fit._combined_loader._iterator

    def state_dict(self) -> dict[str, Any]:
        flags = {}
        for name, obj in self._parts():
            base = self._base[name]
            changed = {key: value for key, value in _flags(obj).items() if key not in base or base[key] != value}
            if changed:
                flags[name] = changed
        connector = self._trainer._logger_connector
        return {
            "loops": self._trainer.fit_loop.state_dict(),
            "flags": flags,
            "added": {name: copy.deepcopy(value) for name, value in self._added()},
            "logged": {name: dict(getattr(connector, name)) for name in _LOGGED},
            "results": [_written(metric) for metric in self._trainer.fit_loop.epoch_loop._results.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.fit_loop.load_state_dict(state["loops"])
        connector = self._trainer._logger_connector
        for name, values in state["logged"].items():
            setattr(connector, name, dict(values))
        self._read(state["results"])
        for name, _ in self._added():
            delattr(self._trainer, name)
        vars(self._trainer).update(copy.deepcopy(state.get("added", {})))
        for name, obj in self._parts():
            own, flags = vars(obj), self._base[name] | state["flags"].get(name, {})
            for key in _flags(obj).keys() - flags.keys():
                del own[key]
            own.update(flags)

    def _added(self) -> list[tuple[str, Any]]:
        """Return the lists, dicts and tuples of plain values that the user's code has set on the Trainer."""
        held = vars(self._trainer).items()
        return [
            (name, value) for name, value in held if name not in self._own and type(value) in _HOLD and _is_data(value)
        ]

    def _log_as_well(self) -> None:
        """Pass each number that the module logs in training to :func:`hpstage.log`, too, before Lightning averages it
        over batches."""
        results = self._trainer.fit_loop.epoch_loop._results
        own = results.log

        def both(fx: str, name: str, value: Any, **about: Any) -> None:
            if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
                log(name, value)
            own(fx, name, value, **about)

        results.log = both

    def _read(self, written: list[dict[str, Any]]) -> None:
        results = self._trainer.fit_loop.epoch_loop._results
        results.clear()
        with self._trainer.precision_plugin.forward_context():  # decides the dtype of a metric's initial values
            for item in written:
                about, values = item["about"], item["values"]
                attribute = about["metric_attribute"]
                value = self._trainer.lightning_module
                for part in attribute.split(".") if not item["is_tensor"] else ():
                    value = getattr(value, part)
                about = {**about, "sync_dist_fn": self._trainer.strategy.reduce, "batch_size": 1}
                results.log(value=values["value"] if item["is_tensor"] else value, **about)
                vars(next(reversed(results.values()))).update(values)


def _is_data(value: Any) -> bool:
    if type(value) in _HOLD:
        items = value.values() if type(value) is dict else value
        return all(map(_is_data, items)) and (type(value) is not dict or all(type(key) in _PLAIN for key in value))
    return type(value) in _PLAIN or (type(value) is torch.Tensor and not value.requires_grad)


def _flags(obj: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(obj).items() if type(value) in _PLAIN and name not in _CLOCKS}


def _written(metric: Any) -> dict[str, Any]:
    """Return the values logged under a name as plain data."""
    meta, own = metric.meta, vars(metric)
    about = {
        name: getattr(meta, name)
        for name in ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "metric_attribute")
    }
    about |= {
        "reduce_fx": meta.reduce_fx.__name__,
        "sync_dist": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
        "add_dataloader_idx": meta.add_dataloader_idx,
    }
    kept = _METRIC if metric.is_tensor else _METRIC[2:]
    return {"about": about, "is_tensor": metric.is_tensor, "values": {name: own[name] for name in kept if name in own}}
