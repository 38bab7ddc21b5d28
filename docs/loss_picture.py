"""Draw the loss of a run as an SVG, with the standard library only.

    python docs/loss_picture.py runs/first/metrics.jsonl loss.svg    every step of a run
    python docs/loss_picture.py README.md docs/first_session.svg     the step lines that a page or a log shows

A file whose name ends in `.jsonl` is read as the metrics of a run. Any other file is read as text, and its lines
`step N/M  loss X ...` are drawn. Points lie at the steps that the file has; straight lines connect them. Markers are
drawn if there are at most `FEW` points. Steps without a finite loss are left out.
"""

import json
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path

Points = list[tuple[int, float]]

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 40, 52  # margins around the axes, in pixels
FEW = 40
TRAINING, VALIDATION, INK, GRID = "#1f6fb4", "#c8500a", "#333333", "#dddddd"
STEP_LINE = re.compile(r"^\s*step +(\d+)/\d+ +loss (\S+)(?:.* val loss (\S+))?", re.MULTILINE)


def read(path: Path) -> tuple[Points, Points]:
    """The training losses and the validation losses of a file, each as (step, loss)."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        records = [json.loads(line) for line in _complete_lines(text)]
        rows = [(record["step"], record.get("loss"), record.get("val_loss")) for record in records]
    else:
        rows = [(int(step), float(loss), val and float(val)) for step, loss, val in STEP_LINE.findall(text)]
    return _points((step, loss) for step, loss, _ in rows), _points((step, loss) for step, _, loss in rows)


def _complete_lines(text: str) -> list[str]:
    """The lines of a file of metrics. A run that was killed can leave a last line without its end."""
    return [line for line in text.split("\n")[:-1] if line.strip()]


def _points(rows: Iterable[tuple[int, float | str | None]]) -> Points:
    return [(step, loss) for step, loss in rows if isinstance(loss, float | int) and math.isfinite(loss)]


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About `count` round numbers, at equal distances, that enclose the range."""
    rough = (high - low or 1.0) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    distance = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough * 0.999)
    first, last = math.floor(low / distance), math.ceil(high / distance)
    return [number * distance for number in range(first, max(last, first + 1) + 1)]


def svg(training: Points, validation: Points) -> str:
    """The picture: loss over steps, training and validation."""
    losses = [loss for _, loss in (*training, *validation)]
    steps, values = [0, max(step for step, _ in (*training, *validation))], ticks(min(losses), max(losses))

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(steps[1], 1)

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (values[-1] - loss) / (values[-1] - values[0])

    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="13" fill="{INK}">',
        "<title>Loss over steps</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for loss in values:
        parts.append(f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(loss) + 4.5:.1f}" text-anchor="end">{loss:g}</text>')
    for step in (tick for tick in ticks(*steps) if tick <= steps[1]):
        parts.append(f'<path d="M{x(step):.1f} {HEIGHT - BOTTOM}v5" stroke="{INK}"/>')
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{step:g}</text>')
    parts += [
        f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="{INK}"/>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">step</text>',
        f'<text transform="translate(18 {middle}) rotate(-90)" text-anchor="middle">loss, nats per token</text>',
    ]
    for number, (name, points, colour) in enumerate(
        [("training loss", training, TRAINING), ("validation loss", validation, VALIDATION)]
    ):
        if not points:
            continue
        path = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(points) <= FEW:
            parts += [f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="4" fill="{colour}"/>' for step, loss in points]
        start = LEFT + 16 + 150 * number
        parts.append(f'<path d="M{start} 20h24" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{start + 32}" y="24.5">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(source: str, target: str) -> None:
    """Draw the losses of the file `source` into the file `target`."""
    training, validation = read(Path(source))
    if not training:
        sys.exit(f"'{source}' has no step with a loss; give the metrics.jsonl of a run, or a text with its step lines")
    Path(target).write_text(svg(training, validation), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
