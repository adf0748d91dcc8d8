"""Where marks lie, and whether they can be seen."""

import re
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config import ROOT
from harness.publish import charts
from harness.publish.charts import Dot, bars, interval, reach, scatter
from harness.stats import Estimate

CSS = (ROOT / "harness/publish/site.css").read_text()
numbers = st.floats(-0.3, 0.3, allow_nan=False)


def estimate(value: float, half: float = 0.01) -> Estimate:
    return Estimate(value, value - half, value + half, 9, "test")


def percent(text: str) -> float:
    assert re.fullmatch(r"-?\d+\.\d\d%", text), text
    return float(text[:-1])


dots_ = st.lists(
    st.builds(
        lambda x, y, kind: Dot(estimate(x), estimate(y), kind, "B=4 g=2" if kind == "front" else "", "#", "words"),
        numbers,
        numbers,
        st.sampled_from(["front", "dominated", "within noise"]),
    ),
    min_size=1,
    max_size=30,
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(dots_)
def test_every_mark_and_its_interval_is_inside_the_plot_in_the_right_order(dots):
    plot = scatter(dots)
    for mark in plot.marks:
        assert 0 <= percent(mark.x_low) <= percent(mark.x) <= percent(mark.x_high) <= 100
        assert 0 <= percent(mark.y_high) <= percent(mark.y) <= percent(mark.y_low) <= 100  # up is better
    for (left, a), (right, b) in combinations(zip(dots, plot.marks, strict=True), 2):
        if left.speed.value < right.speed.value:
            assert percent(a.x) <= percent(b.x)
        if left.accuracy.value < right.accuracy.value:
            assert percent(a.y) >= percent(b.y)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(dots_)
def test_labels_stand_inside_the_plot_and_on_nothing(dots):
    boxes = []
    marks = scatter(dots).marks
    for mark in marks:
        if mark.label:
            width, x, y = 6.6 * len(mark.label), percent(mark.x) * 2.8 + mark.dx, percent(mark.y) * 3 + mark.dy
            left = x - {"start": 0, "middle": width / 2, "end": width}[mark.anchor]
            boxes.append((left, y - 11, left + width, y + 3))
    for left, top, right, bottom in boxes:
        assert left > -0.1
        assert top > -0.1
        assert right < 280.1
        assert bottom < 300.1
    for a, b in combinations(boxes, 2):
        assert a[2] <= b[0] + 0.1 or b[2] <= a[0] + 0.1 or a[3] <= b[1] + 0.1 or b[3] <= a[1] + 0.1
    for mark in marks:
        x, y = percent(mark.x) * 2.8, percent(mark.y) * 3
        assert not any(a + 0.1 < x < c - 0.1 and b + 0.1 < y < d - 0.1 for a, b, c, d in boxes)


def test_the_stairs_go_down_before_they_go_on():
    front = [Dot(estimate(x), estimate(y), "front", "", "#", "") for x, y in ((0.1, 0.0), (0.2, -0.1))]
    plot = scatter(front)
    (x1, y1), (x2, y2) = [(percent(mark.x), percent(mark.y)) for mark in plot.marks]
    assert [tuple(map(percent, piece)) for piece in plot.steps] == [(x1, y1, x1, y2), (x1, y2, x2, y2)]


@settings(derandomize=True, deadline=None)
@given(st.floats(-2, 2), st.floats(0, 2), st.floats(0, 2))
def test_an_interval_is_cut_at_the_end_of_its_scale_and_says_so(value, below, above):
    found = Estimate(value, value - below, value + above, 9, "test")
    mark = interval(found, 1.0)
    assert 0 <= percent(mark.low) <= percent(mark.value) <= percent(mark.high) <= 100
    assert mark.cut_low == (found.low < -1)
    assert mark.cut_high == (found.high > 1)


def test_one_scale_holds_every_value_of_a_column():
    found = [estimate(0.1, 0.5), estimate(-0.2)]
    assert reach(found) > 0.2
    assert reach([]) > 0
    assert reach([estimate(0.0, 0.0)]) > 0


def test_bars_are_shares_and_labels_stand_above_bar_and_baseline():
    found = bars([1, 1, 2], [4], top=1.0, width=4)
    assert [bar.label for bar in found] == ["25", "25", "50", "0"]
    assert [percent(bar.height) for bar in found] == [25, 25, 50, 0]
    assert percent(found[0].base) == 0  # all of the baseline's steps
    assert all(percent(bar.above) <= min(percent(bar.y), percent(bar.base)) for bar in found)
    assert all(bar.base is None for bar in bars([1], None, 1.0, 1))


def test_percent_has_no_negative_zero():
    assert charts.pc(-1e-9) == "0.00%"


def colours(block: str) -> dict[str, str]:
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", block))


LIGHT = colours(CSS.partition("@media")[0])
DARK = LIGHT | colours(CSS.partition("prefers-color-scheme: dark")[2].partition("* {")[0])


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(left: str, right: str) -> float:
    low, high = sorted((luminance(left), luminance(right)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_has_contrast_aa_and_marks_three_to_one(scheme):
    for paper in ("paper", "panel"):
        for text in ("ink", "soft", "link", "good", "bad"):
            assert contrast(scheme[text], scheme[paper]) >= 4.5, (text, paper)
    for mark in ("base", "same", "asd", "block", "other"):
        assert contrast(scheme[mark], scheme["paper"]) >= 3, mark


def test_plots_keep_their_colours_in_both_schemes():
    assert {name: LIGHT[name] for name in ("base", "same", "asd", "block", "other")} == {
        name: DARK[name] for name in ("base", "same", "asd", "block", "other")
    }
