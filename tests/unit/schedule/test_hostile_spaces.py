"""What a space cannot return besides values: names that cannot be stored, marks without end."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from optuna.trial import FixedTrial

from hpstage.errors import ScheduleError
from hpstage.schedule.space import describe


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"a": 1, "\ud800": 1}, "trial 0, hyperparameter '.ud800'.*not valid Unicode"),
        ({"a": 1, "keep_at": itertools.count(1)}, "trial 0, hyperparameter 'keep_at'.*more than 100,000"),
        ({"a": 1, "keep_at": range(1, 10**9)}, "more than 100,000"),
    ],
)
def test_invalid_hyperparameter_names_and_too_many_steps_to_keep_are_refused(
    returned: dict[str, Any], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        describe(lambda _: returned, FixedTrial({}), 4)
