"""Display of a running search: on a terminal, or as lines of a log."""

from hpstage.search.progress.progress import Progress
from hpstage.search.progress.view import ProgressView, line

__all__ = ["Progress", "ProgressView", "line"]
