"""Checks a trainable: whatever way leads to a state, it is the same bit for bit, or what differs is named.

:func:`check` trains a trial straight through in a process of its own, and again in all the ways in which a search may
come to the same states: from states in memory and on disk, in other processes, after another trial, with evaluations
in between. After each step all that training can reach is compared.
"""

from hpstage.checking.children import Children
from hpstage.checking.conduct import check
from hpstage.checking.findings import CheckReport, Finding

__all__ = ["CheckReport", "Children", "Finding", "check"]
