"""Where views of a running search are shown."""

from __future__ import annotations

from abc import ABC, abstractmethod

from hpstage.progress.view import ProgressView


class Display(ABC):
    """Where views are shown."""

    @abstractmethod
    def begin(self, view: ProgressView) -> None:
        """Show the first view."""

    @abstractmethod
    def tell(self, text: str) -> None:
        """Show a line of text that stays; not after the last view."""

    @abstractmethod
    def show(self, view: ProgressView) -> None: ...

    @abstractmethod
    def end(self, view: ProgressView) -> None:
        """Show the last view, which stays, and give back what was taken. Called once, if :meth:`begin` was."""
