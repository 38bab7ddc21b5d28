"""Draws training and validation losses over steps as an SVG, with the standard library only.

pygal, the nearest library, would add four packages to the host, and its pictures differ from one drawing to the next.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

Points = list[tuple[float, float]]
"""(step, loss)."""

MARK = "<!-- drawn by mplug -->"
"""A comment near the beginning of each picture, by which mplug recognises its own."""
WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 40, 52  # margins around the axes, in pixels
FEW = 40
"""Up to so many points are drawn with markers."""
NEAR = 50
"""A point of a smoothed curve is the mean over 1/50 of the points on either side of it; of fewer near the ends."""
MOST = 1024
"""Points of a curve; there are fewer pixels."""
LOGARITHMIC = 10.0
"""If the greatest loss is more than so many times the least, the loss axis is logarithmic."""
TRAINING, VALIDATION, INK, GRID = "#1f6fb4", "#c8500a", "#333333", "#dddddd"
PALE = {TRAINING: "#b9d2ea", VALIDATION: "#edc4ae"}
"""The colours of the points behind a smoothed curve."""


class Curve:
    """Losses by step, in at most `MOST` points: a point is the mean of `width` steps, which doubles when needed."""

    def __init__(self) -> None:
        self.width = 1
        self._sums: list[tuple[float, float, int]] = []
        """Of each point: the sum of its steps, the sum of its losses, their number."""

    def add(self, step: int, loss: float | None) -> None:
        """Add the loss of the next step; a loss that is not finite has no place in a picture."""
        if loss is None or not math.isfinite(loss):
            return
        self._append(step, loss, 1)
        while len(self._sums) > MOST:
            before, self._sums, self.width = self._sums, [], 2 * self.width
            for sums in before:
                self._append(*sums)

    def _append(self, steps: float, losses: float, number: int) -> None:
        if self._sums:
            last = self._sums[-1]
            if self._place(last[0] / last[2]) == self._place(steps / number):
                self._sums[-1] = (last[0] + steps, last[1] + losses, last[2] + number)
                return
        self._sums.append((steps, losses, number))

    def _place(self, step: float) -> int:
        return int(step - 1) // self.width

    def points(self) -> Points:
        """The points to draw."""
        return [(steps / number, losses / number) for steps, losses, number in self._sums]


@dataclass(frozen=True)
class Figure:
    """What a picture shows: its title, the name of its vertical axis, and those of both curves."""

    title: str = "Loss over steps"
    axis: str = "loss, nats per token"
    training: str = "training loss"
    validation: str = "validation loss"
    may_be_logarithmic: bool = True


LOSSES = Figure()


def svg(training: Curve, validation: Curve, figure: Figure = LOSSES) -> str | None:
    """The picture of both curves; None if no step has a finite loss."""
    curves = [(figure.training, training, TRAINING), (figure.validation, validation, VALIDATION)]
    points = [point for _, curve, _ in curves for point in curve.points()]
    if not points:
        return None
    last = max(step for step, _ in points)
    losses, values, is_log = _loss_axis([loss for _, loss in points], figure.may_be_logarithmic)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(last, 1)

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - losses(loss))

    parts = [*_frame(figure, is_log)]
    for loss in values:
        parts.append(f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(loss) + 4.5:.1f}" text-anchor="end">{loss:g}</text>')
    for step in (tick for tick in ticks(0, last) if tick <= last):
        parts.append(f'<path d="M{x(step):.1f} {HEIGHT - BOTTOM}v5" stroke="{INK}"/>')
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{step:g}</text>')
    parts.append(f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="{INK}"/>')
    start = LEFT + 16
    for name, curve, colour in curves:
        if curve.points():
            points, reach = curve.points(), len(curve.points()) // NEAR if len(curve.points()) > FEW else 0
            label = name if curve.width == 1 else f"{name}, means of {curve.width} steps"
            if reach:
                label += f", smoothed over {(2 * reach + 1) * curve.width}"
                parts += _line([(x(step), y(loss)) for step, loss in points], PALE[colour], width=1)
            parts += _line([(x(step), y(loss)) for step, loss in smoothed(points, reach)], colour)
            parts.append(f'<path d="M{start} 20h24" stroke="{colour}" stroke-width="2"/>')
            parts.append(f'<text x="{start + 32}" y="24.5">{label}</text>')
            start += 60 + 7 * len(label)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _frame(figure: Figure, is_log: bool) -> Iterator[str]:
    """The background and the names of the axes."""
    middle, unit = (TOP + HEIGHT - BOTTOM) / 2, ", log scale" if is_log else ""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="13" fill="{INK}">'
    )
    yield MARK
    yield f"<title>{figure.title}</title>"
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">step</text>'
    yield f'<text transform="translate(18 {middle}) rotate(-90)" text-anchor="middle">{figure.axis}{unit}</text>'


def smoothed(points: Points, reach: int) -> Points:
    """Each point with the mean of the losses of up to `reach` points on either side, equally many on both."""
    sums = [0.0, *accumulate(loss for _, loss in points)]
    found = []
    for place, (step, _) in enumerate(points):
        side = min(reach, place, len(points) - 1 - place)
        found.append((step, (sums[place + side + 1] - sums[place - side]) / (2 * side + 1)))
    return found


def _line(points: Points, colour: str, width: int = 2) -> Iterator[str]:
    """A line through points in pixels, with markers if they are few."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
    if len(points) <= FEW:
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in points)


def _loss_axis(losses: list[float], may_be_logarithmic: bool) -> tuple[Callable[[float], float], list[float], bool]:
    """(the share of the axis below a loss, the ticks, whether the axis is logarithmic)."""
    low, high = min(losses), max(losses)
    if may_be_logarithmic and low > 0 and high / low > LOGARITHMIC:
        values = log_ticks(low, high)
        first, last = math.log(values[0]), math.log(values[-1])
        return lambda loss: (math.log(loss) - first) / (last - first), values, True
    values = ticks(low, high)
    return lambda loss: (loss - values[0]) / (values[-1] - values[0]), values, False


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About `count` round numbers, at equal distances, that enclose the range."""
    rough = (high - low or 1.0) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    distance = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough * 0.999)
    first, last = math.floor(low / distance), math.ceil(high / distance)
    return [number * distance for number in range(first, max(last, first + 1) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers that enclose the range: 1, 2 and 5 of each power of ten, or powers only if they are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 5 else (1,)
    numbers = [factor * 10.0**power for power in powers for factor in factors]
    first = max(place for place, number in enumerate(numbers) if number <= low * (1 + 1e-9))
    last = min(place for place, number in enumerate(numbers) if number >= high * (1 - 1e-9))
    return numbers[first : last + 1]
