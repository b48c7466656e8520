"""What training code is given reads as a dict, and names what the space lacks."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from hpstage.errors import UsageError
from hpstage.schedule.hyper_parameters import HyperParameters


def test_a_name_that_is_missing_is_named_with_those_that_are_there() -> None:
    values = HyperParameters({"lr": 0.1, "batch_size": 64})
    with pytest.raises(
        KeyError, match=r"^the space has no hyper-parameter 'dropout'; it has 'batch_size', 'lr'$"
    ) as caught:
        values["dropout"]
    assert isinstance(caught.value, UsageError)
    with pytest.raises(KeyError, match=r"it has none$"):
        HyperParameters()["lr"]
    copied = pickle.loads(pickle.dumps(caught.value))  # noqa: S301  # as between processes
    assert str(copied) == str(caught.value)


def test_all_else_is_as_with_a_dict() -> None:
    values = HyperParameters({"lr": 0.1})
    assert values.get("dropout") is None and values.get("dropout", 0.5) == 0.5
    assert "dropout" not in values
    assert values == {"lr": 0.1} == {**values}
    assert json.dumps(values) == '{"lr": 0.1}'
    for copied in (copy.deepcopy(values), pickle.loads(pickle.dumps(values))):  # noqa: S301  # as between processes
        assert copied == values and type(copied) is HyperParameters
