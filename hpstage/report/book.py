"""The name of :mod:`hpstage.accounting.book` until 0.3."""

from hpstage.errors.deprecation import moved

__getattr__ = moved(__name__, "hpstage.accounting.book")
