"""Where the marks of a plot lie: numbers in, percent of the plot's box out, so that one drawing fits every width.

x grows to the right and y downwards, as in SVG. Labels are placed for a box of NARROW x HEIGHT pixels, the narrowest
that a page gives; a wider one only moves them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from harness.publish.cells import signed
from harness.stats import Estimate

NARROW, HEIGHT = 280, 300  # px of the plot's box on a phone
LETTER, LINE = 6.6, 14  # px of a label's letter and line
RADIUS = 5.5  # px of a point


@dataclass(frozen=True)
class Axis:
    """low, high: ends in the data's unit. ticks: (percent along the axis, label)."""

    low: float
    high: float
    ticks: tuple[tuple[str, str], ...]

    def at(self, value: float) -> float:
        return 100 * (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Interval:
    """A small mark of a table cell, in percent of its width. cut: the end lies beyond the scale."""

    zero: str
    value: str
    low: str
    high: str
    cut_low: bool
    cut_high: bool


@dataclass(frozen=True)
class Mark:
    """A point with both intervals. label: empty where it found no room or is none; dx, dy, anchor: where it stands."""

    x: str
    y: str
    x_low: str
    x_high: str
    y_low: str
    y_high: str
    kind: str
    href: str
    words: str
    label: str = ""
    dx: float = 0
    dy: float = 0
    anchor: str = "start"


@dataclass(frozen=True)
class Scatter:
    """steps: the front as straight pieces (x1, y1, x2, y2). zero: where the baseline is."""

    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    steps: tuple[tuple[str, str, str, str], ...]
    zero: tuple[str, str]
    zero_label: tuple[float, float, str]


def pc(value: float) -> str:
    """Percent, two decimals: equal numbers have equal bytes."""
    return f"{value + 0.0:.2f}%".replace("-0.00%", "0.00%")


def axis(values: Iterable[float], unit: str = "", flip: bool = False) -> Axis:
    """Round ticks inside the range of `values` and zero, with air on both sides."""
    from matplotlib.ticker import MaxNLocator

    values = [0.0, *values]
    low, high = min(values), max(values)
    air = 0.06 * (high - low) or 1.0
    low, high = low - air, high + air
    inside = [tick for tick in MaxNLocator(nbins=5).tick_values(low, high) if low <= tick <= high]
    digits = max((len(f"{tick:.3f}".rstrip("0").partition(".")[2]) for tick in inside), default=0)
    made = Axis(low, high, ())
    ticks = tuple(
        (pc(100 - made.at(tick) if flip else made.at(tick)), signed(float(tick), digits, unit)) for tick in inside
    )
    return Axis(low, high, ticks)


def interval(estimate: Estimate, reach: float) -> Interval:
    """On a scale from -reach to +reach, whose middle is no change."""

    def at(value: float) -> str:
        return pc(50 + 50 * max(-1.0, min(1.0, value / reach)))

    return Interval(
        zero=pc(50),
        value=at(estimate.value),
        low=at(estimate.low),
        high=at(estimate.high),
        cut_low=estimate.low < -reach,
        cut_high=estimate.high > reach,
    )


def reach(estimates: Sequence[Estimate]) -> float:
    """One scale for a column: a little more than its largest change, and than its narrowest interval."""
    if not estimates:
        return 1.0
    narrowest = min(max(abs(each.low), abs(each.high)) for each in estimates)
    return 1.3 * max(max(abs(each.value) for each in estimates), narrowest) or 1.0


@dataclass(frozen=True)
class Dot:
    """A point before it is drawn. kind: `front`, `within noise`, `dominated` or `arm`."""

    speed: Estimate
    accuracy: Estimate
    kind: str
    label: str
    href: str
    words: str


def scatter(dots: Sequence[Dot]) -> Scatter:
    """Throughput to the right, accuracy up, both in percent of change; the front as a staircase."""
    x = axis([100 * end for dot in dots for end in (dot.speed.low, dot.speed.high)], " %")
    y = axis([100 * end for dot in dots for end in (dot.accuracy.low, dot.accuracy.high)], " pp", flip=True)

    def across(value: float) -> float:
        return x.at(100 * value)

    def down(value: float) -> float:
        return 100 - y.at(100 * value)

    zero = (pc(across(0.0)), pc(down(0.0)))
    taken = [_around(across(dot.speed.value), down(dot.accuracy.value)) for dot in dots]
    zero_label = _place(across(0.0), down(0.0), "baseline", taken) or PLACES[0]
    marks = []
    for dot in dots:
        at = across(dot.speed.value), down(dot.accuracy.value)
        place = _place(*at, dot.label, taken) if dot.label else None
        label = {"label": dot.label, "dx": place[0], "dy": place[1], "anchor": place[2]} if place else {}
        marks.append(
            Mark(
                x=pc(at[0]),
                y=pc(at[1]),
                x_low=pc(across(dot.speed.low)),
                x_high=pc(across(dot.speed.high)),
                y_low=pc(down(dot.accuracy.low)),
                y_high=pc(down(dot.accuracy.high)),
                kind=dot.kind.replace(" ", "-"),
                href=dot.href,
                words=dot.words,
                **label,  # type: ignore[arg-type]
            )
        )
    corners = sorted({(across(d.speed.value), down(d.accuracy.value)) for d in dots if d.kind == "front"})
    return Scatter(x, y, tuple(marks), _staircase(corners), zero, zero_label)


def _staircase(corners: Sequence[tuple[float, float]]) -> tuple[tuple[str, str, str, str], ...]:
    """Beyond a corner only the next one is as fast: down to its accuracy first, then across."""
    pieces = []
    for (x1, y1), (x2, y2) in pairwise(corners):
        pieces += [(x1, y1, x1, y2), (x1, y2, x2, y2)]
    return tuple((pc(a), pc(b), pc(c), pc(d)) for a, b, c, d in pieces)


PLACES = ((9, -4, "start"), (9, 13, "start"), (-9, -4, "end"), (-9, 13, "end"), (0, -10, "middle"), (0, 20, "middle"))
Box = tuple[float, float, float, float]


def _box(x: float, y: float, dx: float, dy: float, anchor: str, letters: int) -> Box:
    """left, top, right, bottom in px of the narrow box, of a label (dy: of its base line) at percent x, y."""
    width = LETTER * letters
    left = x / 100 * NARROW + dx - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
    base = y / 100 * HEIGHT + dy
    return left, base - LINE + 3, left + width, base + 3


def _around(x: float, y: float) -> Box:
    """Of a point."""
    left, top = x / 100 * NARROW, y / 100 * HEIGHT
    return left - RADIUS, top - RADIUS, left + RADIUS, top + RADIUS


def _place(x: float, y: float, label: str, taken: list[Box]) -> tuple[float, float, str] | None:
    """The first free place around the point, which is taken from then on."""
    for dx, dy, anchor in PLACES:
        box = _box(x, y, dx, dy, anchor, len(label))
        inside = box[0] >= 0 and box[2] <= NARROW and box[1] >= 0 and box[3] <= HEIGHT
        if inside and not any(_overlap(box, other) for other in taken):
            taken.append(box)
            return dx, dy, anchor
    return None


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@dataclass(frozen=True)
class Bar:
    """x, width, y, height, base in percent of the box; base: where the baseline's bar ends, None for the baseline.

    above: where the label stands, free of both.
    """

    x: str
    width: str
    y: str
    height: str
    base: str | None
    above: str
    centre: str
    label: str
    count: int
    words: str


def bars(counts: Sequence[int], baseline: Sequence[int] | None, top: float, width: int) -> tuple[Bar, ...]:
    """Shares of `counts` as bars under a ceiling of share `top`, `width` bars wide."""
    shares = share(counts, width)
    base = share(baseline, width) if baseline is not None else None
    pitch = 100 / max(width, 1)
    return tuple(
        Bar(
            x=pc(n * pitch + 0.12 * pitch),
            width=pc(0.76 * pitch),
            y=pc(100 - 100 * value / top),
            height=pc(100 * value / top),
            base=pc(100 - 100 * base[n] / top) if base else None,
            above=pc(100 - 100 * max(value, base[n] if base else 0.0) / top),
            centre=pc((n + 0.5) * pitch),
            label=f"{100 * value:.0f}",
            count=n,
            words=f"{n} accepted: {100 * value:.1f} %",
        )
        for n, value in enumerate(shares)
    )


def share(counts: Sequence[int], width: int) -> list[float]:
    total = sum(counts) or 1
    return [(counts[n] if n < len(counts) else 0) / total for n in range(width)]
