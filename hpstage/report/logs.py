"""The name of :mod:`hpstage.report.trial_log` until 0.3."""

from hpstage.errors.deprecation import moved

__getattr__ = moved(__name__, "hpstage.report.trial_log")
