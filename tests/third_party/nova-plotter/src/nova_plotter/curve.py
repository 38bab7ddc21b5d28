"""A curve as SVG: points in, text out."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

Points = list[tuple[float, float]]
"""(step, loss)."""

WIDTH, HEIGHT = 800, 400
LEFT, RIGHT, TOP, BOTTOM = 60, WIDTH - 20, 20, HEIGHT - 40
"""Pixels: the picture, and the frame of the curve in it."""
MOST_POINTS = 400


@dataclass(frozen=True)
class Scale:
    """Values to pixels, linearly: `low` is drawn at `start`, `high` at `end`."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> "Scale":
        """The scale on which all of `values` fit; a single value gets room of its own."""
        low, high = min(values), max(values)
        return cls(low, high, start, end) if low < high else cls(low - 0.5, low + 0.5, start, end)

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Three to eight round values within the scale."""
        rough = (self.high - self.low) / 4
        power = 10.0 ** math.floor(math.log10(rough))
        distance = max(power * factor for factor in (1, 2, 5) if power * factor <= rough)
        first, last = math.ceil(self.low / distance), math.floor(self.high / distance)
        return [number * distance for number in range(first, last + 1)]


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most so many points: the means of equal stretches."""
    if len(points) <= most:
        return points
    cuts = [len(points) * part // most for part in range(most + 1)]
    stretches = [points[start:stop] for start, stop in pairwise(cuts)]
    return [(_mean([x for x, _ in stretch]), _mean([y for _, y in stretch])) for stretch in stretches]


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def picture(training: Points, validation: Points) -> str:
    """An SVG document of a line of at least one point, and of dots."""
    return "\n".join(_elements(thinned(training), thinned(validation), training[-1])) + "\n"


def _elements(line: Points, dots: Points, newest: tuple[float, float]) -> Iterator[str]:
    x = Scale.over([step for step, _ in [*line, *dots]], LEFT, RIGHT)
    y = Scale.over([loss for _, loss in [*line, *dots]], BOTTOM, TOP)
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" style="font: 12px sans-serif">'
    yield f"<title>loss {newest[1]:.4f} at step {newest[0]:g}</title>"
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    for tick in x.ticks():
        yield f'<text x="{x(tick):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{tick:g}</text>'
    for tick in y.ticks():
        yield f'<path d="M{LEFT} {y(tick):.1f}H{RIGHT}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.6g}</text>'
    points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in line)
    yield f'<polyline fill="none" stroke="#1f5fa8" stroke-width="1.5" points="{points}"/>'
    for step, loss in dots:
        yield f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="3" fill="#c4551a"/>'
    yield "</svg>"
