"""Runs before training: evaluates the untrained model, and measures step backends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from hpstage.errors import UsageError
from hpstage.execution.outcomes import failure_of, missing_hyperparameter
from hpstage.schedule import Scalar
from hpstage.trainable import Trainable
from hpstage.training.adapter import Adapter, checked_metrics

logger = logging.getLogger("hpstage")


def metrics_untrained(trainable: Trainable, initial: Mapping[str, Scalar]) -> dict[str, float] | None:
    """Return metrics of the untrained model; ``None`` if it cannot be evaluated yet.

    Raises:
        UsageError: training cannot begin, for example because a hyperparameter has no value.
    """
    try:
        return evaluate_untrained(trainable, initial)
    except UsageError:
        raise  # a misuse that training cannot fix
    except Exception:
        # Many models cannot be evaluated untrained (scikit-learn's raise NotFittedError). A real error will be
        # raised again, with its traceback, in the first chain.
        logger.debug("the untrained model could not be evaluated", exc_info=True)
        return None


def evaluate_untrained(trainable: Trainable, initial: Mapping[str, Scalar]) -> dict[str, float]:
    """Return metrics of the untrained model. Raises what the user's code raises, and :class:`UsageError` as
    :func:`metrics_untrained` does."""
    try:
        if (rehearse := getattr(trainable, "rehearse", None)) is not None:
            rehearse(initial)
        trainable.setup(initial)
        if isinstance(trainable, Adapter):
            trainable.prepare()
    except KeyError as error:
        if missing_hyperparameter(error, initial) is None:
            raise
        # With its traceback, since another mapping may lack the key.
        failure = failure_of(error, __file__, initial)
        raise UsageError(f"training cannot begin: {failure.summary}\n{failure.traceback}") from error
    return checked_metrics(trainable.evaluate())


def measured(trainable: Trainable, initial: Mapping[str, Scalar], steps: float) -> dict[str, float] | None:
    """Return the result of :meth:`hpstage.executor.Executor.measure` for a trainable in this process."""
    measure: Callable[..., dict[str, float]] | None = getattr(trainable, "measure_backends", None)
    return None if measure is None else measure(initial, steps)
