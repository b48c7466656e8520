"""Sibling models trained as one: their parameters stacked, bit for bit as if each were trained by itself.

A step is recorded once as a flat graph of tensor operations (``tracing``). For a number of members it becomes a program
in which an operation takes place on all members at once where that has, bit for bit, the result that it has for each
alone, which is tried out (``planning``), and member by member elsewhere. So it makes no difference to a member how many
others there are, and a bundle of one is the reference.
"""

from hpstage.torch.backends.backend import NeedsPython, NotStackable
from hpstage.torch.backends.stacked.building import Builder
from hpstage.torch.backends.stacked.bundle import Bundle, Member
from hpstage.torch.backends.stacked.signature import shape_key

__all__ = ["Builder", "Bundle", "Member", "NeedsPython", "NotStackable", "shape_key"]
