"""Display of a running search: on a terminal, or as lines of a log."""

from hpstage.progress.progress import Progress, open_display
from hpstage.progress.view import ProgressView, line

__all__ = ["Progress", "ProgressView", "line", "open_display"]
