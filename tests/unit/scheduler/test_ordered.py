"""Ordered lists and wanted steps, against sorted copies of plain sets and dicts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpstage.plan.ordered import Ordered
from hpstage.scheduler.branches import Branch, Wanted
from tests.unit.plan.test_winners import NODE

numbers = st.integers(0, 12)


@given(st.lists(st.tuples(st.booleans(), numbers)), numbers, numbers, st.tuples(st.booleans(), st.booleans()))
def test_an_ordered_list_behaves_as_a_sorted_set(changes, low, high, inclusive):
    ordered: Ordered[int] = Ordered()
    plain: set[int] = set()
    for add, item in changes:
        (ordered.add if add else ordered.discard)(item)
        (plain.add if add else plain.discard)(item)
    assert list(ordered) == sorted(plain)
    assert all((item in ordered) == (item in plain) for item in range(13))
    above = [i for i in sorted(plain) if (i >= low if inclusive[0] else i > low)]
    within = [i for i in above if (i <= high if inclusive[1] else i < high)]
    assert list(ordered.irange(low, high, inclusive)) == within
    assert list(ordered.irange(low, None, inclusive)) == above
    assert ordered.first(low, inclusive=inclusive[0]) == (above[0] if above else None)
    below = [i for i in sorted(plain) if (i <= high if inclusive[1] else i < high)]
    assert list(ordered.irange(high=high, inclusive=inclusive)) == below
    assert ordered.last(high) == max((i for i in plain if i <= high), default=None)


@given(st.lists(st.tuples(st.booleans(), numbers)), numbers, numbers, st.tuples(st.booleans(), st.booleans()))
def test_a_branch_returns_its_wanted_steps_in_order(changes, low, high, inclusive):
    branch = Branch(NODE, None, 1.0)
    plain: dict[int, Wanted] = {}
    for add, step in changes:
        if add:
            plain[step] = branch.want(step)
        elif step in plain:
            branch.wanted.drop(step)
            del plain[step]
    wanted = [plain[step] for step in sorted(plain)]
    assert branch.wanted == wanted
    assert all(branch.wanted.at(step) is plain.get(step) for step in range(13))
    assert branch.wanted.after(low) == next((one for one in wanted if one.step > low), None)
    above = [one for one in wanted if (one.step >= low if inclusive[0] else one.step > low)]
    assert branch.wanted.between(low, None, inclusive) == above
    within = [one for one in above if (one.step <= high if inclusive[1] else one.step < high)]
    assert low > high or branch.wanted.between(low, high, inclusive) == within
