"""The digest of a string. Which code is digested: :mod:`hpstage.training.identity.code_identity`."""

from __future__ import annotations

import hashlib


def hashed(text: str) -> str:
    """Return 32 hex digits of blake2b; lone surrogates are allowed."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
