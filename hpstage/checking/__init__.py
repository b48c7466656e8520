"""Checks that a trainable reaches the same states, bit for bit, in every way of training, or names the differences.

:func:`check` trains a trial straight through in a separate process, and again in all the ways in which a search may
reach the same states: from states in memory and on disk, in other processes, after another trial, with evaluations in
between. After each step, everything that training can reach is compared.
"""

from hpstage.checking.conduct import Children, check
from hpstage.checking.findings import CheckReport, Finding

__all__ = ["CheckReport", "Children", "Finding", "check"]
