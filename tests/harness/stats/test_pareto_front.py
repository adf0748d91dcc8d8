"""The front against its definition, written out over every pair."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.stats.estimate import Estimate, unknown
from harness.stats.pareto import Point, front

SMALL = st.integers(0, 4)  # few values: ties and touching intervals are common


@st.composite
def estimates(draw):
    value = draw(SMALL)
    return Estimate(float(value), float(value - draw(SMALL)), float(value + draw(SMALL)), 9, "test")


@st.composite
def sets(draw):
    pairs = draw(st.lists(st.tuples(estimates(), estimates()), max_size=8))
    return [Point(f"p{n}", *pair) for n, pair in enumerate(pairs)]


def standing(p: Point, points: list[Point]) -> str:
    found = "front"
    for q in points:
        dv, da = q.speed.value - p.speed.value, q.accuracy.value - p.accuracy.value
        if min(dv, da) < 0 or max(dv, da) == 0:
            continue
        if q.speed.low - p.speed.high > 0 or q.accuracy.low - p.accuracy.high > 0:
            return "dominated"
        found = "within noise"
    return found


@settings(derandomize=True, deadline=None)
@given(sets())
def test_every_standing_follows_from_the_pairs(points):
    places = front(points)
    assert [place.point for place in places] == points
    assert [place.standing for place in places] == [standing(point, points) for point in points]
    names = {point.name: point for point in points}
    for place in places:
        assert (place.by is None) == (place.standing == "front")
        if place.by is not None:
            q = names[place.by]
            assert q.speed.value >= place.point.speed.value
            assert q.accuracy.value >= place.point.accuracy.value


@settings(derandomize=True, deadline=None)
@given(sets())
def test_something_is_on_the_front_and_nothing_below_it_is_undominated(points):
    places = front(points)
    assert not points or any(place.standing == "front" for place in places)


@pytest.mark.parametrize("bad", [unknown("nothing"), Estimate(0.0, -1.0, float("inf"), 2, "open")])
def test_a_point_without_an_interval_has_no_place(bad):
    with pytest.raises(ValueError, match="q: accuracy: expected a finite value and interval"):
        Point("q", Estimate(0.0, 0.0, 0.0, 2, "test"), bad)
