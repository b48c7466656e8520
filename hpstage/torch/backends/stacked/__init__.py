"""Sibling models trained as one: their parameters are stacked, with the bits of training each by itself.

A step is recorded once as a flat graph of tensor operations (``tracing``). For a given number of members, the graph
becomes a program: an operation is done on all members at once if tests show that each member gets the bits that it gets
without the others (``planning``), and else member by member. So the number of other members makes no difference to a
member, and a bundle of one is the reference.
"""

from hpstage.torch.backends.backend import NeedsPython, NotStackable
from hpstage.torch.backends.stacked.building import Builder
from hpstage.torch.backends.stacked.bundle import Bundle, Member
from hpstage.torch.backends.stacked.signature import shape_key

__all__ = ["Builder", "Bundle", "Member", "NeedsPython", "NotStackable", "shape_key"]
