"""Ordered lists and step maps, against sorted copies of plain sets and dicts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpstage.plan.ordered import Ordered, StepMap

numbers = st.integers(0, 12)


@given(st.lists(st.tuples(st.booleans(), numbers)), numbers, numbers, st.tuples(st.booleans(), st.booleans()))
def test_an_ordered_list_is_a_sorted_set(changes, low, high, inclusive):
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
    below = [i for i in sorted(plain, reverse=True) if (i <= high if inclusive[1] else i < high)]
    assert list(ordered.rrange(high, inclusive[1])) == below
    assert ordered.last(high) == max((i for i in plain if i <= high), default=None)


@given(st.lists(st.tuples(st.booleans(), numbers)))
def test_a_step_map_knows_its_steps_in_order(changes):
    map: StepMap[str] = StepMap()
    plain: dict[int, str] = {}
    for add, step in changes:
        if add:
            map[step] = plain[step] = f"at {step}"
        elif step in plain:
            del map[step], plain[step]
    assert map == plain
    assert map.steps == sorted(plain)
