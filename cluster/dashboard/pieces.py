"""The states of a piece of a branch."""

from __future__ import annotations

from typing import Literal, get_args

PieceState = Literal["waiting", "ready", "running", "done", "reused", "failed"]
STATES: tuple[PieceState, ...] = get_args(PieceState)
