"""Trials as runs of experiment trackers: TensorBoard, MLflow, Weights & Biases. Each needs its own package."""

from hpstage.errors import UsageError


def not_installed(error: ImportError, package: str) -> Exception:
    """Return the error to raise where importing a tracker's package has failed: a remedy if it is not installed."""
    if (error.name or "").partition(".")[0] != package:
        return error
    return UsageError(f'{package} is not installed: pip install "hpstage[{package}]"')
