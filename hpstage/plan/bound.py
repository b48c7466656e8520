"""The name of :mod:`hpstage.accounting.bound` until 0.3."""

from hpstage.errors.deprecation import moved

__getattr__ = moved(__name__, "hpstage.accounting.bound")
