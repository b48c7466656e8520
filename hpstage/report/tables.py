"""The name of :mod:`hpstage.accounting.tables` until 0.3."""

from hpstage.errors.deprecation import moved

__getattr__ = moved(__name__, "hpstage.accounting.tables")
