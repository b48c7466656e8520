"""Trials as runs of experiment trackers: TensorBoard, MLflow, Weights & Biases. Each needs its own package."""

from hpstage.errors import UsageError


def not_installed(error: ImportError, package: str) -> Exception:
    """Return the error to raise after importing a tracker's package has failed. If the package is missing, it is a
    :class:`UsageError` with the remedy, else ``error`` itself."""
    if (error.name or "").partition(".")[0] != package:
        return error
    return UsageError(f'{package} is not installed: pip install "hpstage[{package}]"')
