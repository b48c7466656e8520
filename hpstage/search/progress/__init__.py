"""Display of a running search: on a terminal, or as lines of a log."""

from hpstage.search.progress.progress import Progress, open_display
from hpstage.search.progress.view import ProgressView, line

__all__ = ["Progress", "ProgressView", "line", "open_display"]
