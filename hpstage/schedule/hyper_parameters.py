"""The hyper-parameters that training code reads: a dict that names what the space lacks."""

from __future__ import annotations

from typing import NoReturn

from hpstage.errors import MissingHyperparameter
from hpstage.schedule.scalars import Scalar


class HyperParameters(dict[str, Scalar]):
    """The value of every hyper-parameter at a step. It differs from a dict only in the error for a name that is not
    there."""

    def __missing__(self, name: object) -> NoReturn:
        raise MissingHyperparameter(name, self)
