"""The name in version 0.3 of :mod:`hpstage.training.identity.code_identity`, which a later version removes."""

from __future__ import annotations

from hpstage.training.identity.code_identity import code_identity

__all__ = ["code_identity"]
