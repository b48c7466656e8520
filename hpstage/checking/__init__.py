"""Checks that a trainable reaches the same state, bit for bit, in every way, or names what differs.

:func:`check` trains a trial straight through in a separate process, and again in all the ways in which a search may
reach the same states: from states in memory and on disk, in other processes, after another trial, with evaluations in
between. After each step, everything that training can reach is compared.
"""

from hpstage.checking.conduct import Children, check
from hpstage.checking.findings import CheckReport, Finding

__all__ = ["CheckReport", "Children", "Finding", "check"]
