"""The interface of displays of a running search."""

from __future__ import annotations

from abc import ABC, abstractmethod

from hpstage.search.progress.view import ProgressView


class Display(ABC):
    """Shows views of a running search."""

    @abstractmethod
    def begin(self, view: ProgressView) -> None:
        """Show the first view."""

    @abstractmethod
    def write(self, text: str) -> None:
        """Show a permanent line of text; not allowed after the last view."""

    @abstractmethod
    def show(self, view: ProgressView) -> None: ...

    @abstractmethod
    def end(self, view: ProgressView) -> None:
        """Show the last view, which stays, and release all resources. Called once if :meth:`begin` was."""
