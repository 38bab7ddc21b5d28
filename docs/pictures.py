"""Draw the pictures in docs/pictures.

Schedules and layouts are drawn from the tables and the meshes that runs use, curves from the losses that
benchmarks/mixer_curves.py and benchmarks/transfer.py have recorded.

python docs/pictures.py

A test keeps the pictures equal to what this script draws.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from mplug_explain.chart import picture

from mplug import Axis, Mesh, Model
from mplug.commands import Registry, default_settings, prepare, read_assignments, resolve
from mplug_schedules import Shape, Table, proven_table

FOLDER = Path(__file__).parent / "pictures"
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b": {},
    "interleaved": {},
    "zb-h1": {},
    "zb-limited": {"limit": 7},
    "zb-v": {},
    "dualpipe-v": {},
}
"""The bundled schedules, each with its settings in the picture."""
RANKS, MICRO_BATCHES = 4, 8
LAYOUTS = {
    "layout": ("tp2pp2dp2", {}),
    "layout_of_experts": ("tp2cp2pp2ep4", {"model.name": "mixtral", "model.preset": "tiny"}),
}
"""The drawn layouts, each with further settings of the run."""
CELL, MARGIN, TITLE = 44, 8, 18
"""Pixels of a rank's square, around a group of ranks, and of its title."""
CURVES = Path(__file__).parent.parent / "benchmarks" / "mixer_curves.json"
TRANSFER = CURVES.with_name("transfer.json")
NEEDLES = CURVES.with_name("needles.json")
WIDTHS = {128: "#7fa8d9", 256: "#1f5fa8", 512: "#12305c"}
"""The colours of the widths of benchmarks/transfer.py."""
COLOURS = {"dense": "#b3541e", "hybrid": "#1f5fa8"}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 320, 56, 28, 40
"""Pixels of the picture of curves, and of the space around its axes."""
SHADES = ("#f4f6fb", "#dfe7f5", "#c4d4ee", "#a5bfe6")
"""The fills of groups, from the outermost on."""


def schedule(name: str) -> str:
    """The chart of a schedule for `RANKS` ranks and `MICRO_BATCHES` micro batches."""

    def table(number: int) -> Table:
        return proven_table(name, Shape(RANKS, number, **SCHEDULES[name]))

    stages = SimpleNamespace(table=table, schedule=name)
    return picture(cast("Model", SimpleNamespace(stages=stages)), MICRO_BATCHES)


def mesh_of(layout: str, further: Mapping[str, str]) -> Mesh:
    """The mesh of a run with this layout."""
    words = {"parallel.layout": layout, "trainer.micro_batch_size": 1, "trainer.seq_length": 256, **further}
    settings = read_assignments([f"{field}={value}" for field, value in words.items()])
    return prepare(resolve(Registry(), default_settings(), settings)).mesh


def ranks_in(mesh: Mesh, axes: tuple[Axis, ...], chosen: Mapping[str, int]) -> list[int]:
    """The ranks at these positions of some axes."""
    return [
        rank
        for rank in range(mesh.world_size)
        if all(mesh.index(rank, axis.name) == chosen[axis.name] for axis in axes if axis.name in chosen)
    ]


def boxes(
    mesh: Mesh, axes: tuple[Axis, ...], chosen: Mapping[str, int], x: float, y: float, depth: int = 0
) -> tuple[list[str], float, float]:
    """The drawing of the ranks at the chosen positions, with its width and height.

    Each axis is a level: a box for each position, side by side on one level and one below another on the next.
    """
    left = [axis for axis in axes if axis.name not in chosen]
    if not left:
        (rank,) = ranks_in(mesh, axes, chosen)
        middle = f'x="{x + CELL / 2:g}" y="{y + CELL / 2 + 5:g}" font-size="14" text-anchor="middle"'
        square = f'<rect x="{x:g}" y="{y:g}" width="{CELL}" height="{CELL}" rx="4" fill="#fff" stroke="#334"/>'
        return [square, f"<text {middle}>{rank}</text>"], CELL, CELL
    axis, across = left[0], depth % 2 == 0
    drawn: list[str] = []
    width = height = 0.0
    for position in range(axis.size):
        at_x, at_y = (x + width, y) if across else (x, y + height)
        inner, w, h = boxes(
            mesh, axes, {**chosen, axis.name: position}, at_x + MARGIN, at_y + TITLE + MARGIN / 2, depth + 1
        )
        w, h = w + 2 * MARGIN, h + TITLE + 1.5 * MARGIN
        fill = SHADES[min(depth, len(SHADES) - 1)]
        drawn.append(
            f'<rect x="{at_x:g}" y="{at_y:g}" width="{w:g}" height="{h:g}" rx="6" fill="{fill}" stroke="#889"/>'
        )
        drawn.append(
            f'<text x="{at_x + MARGIN:g}" y="{at_y + TITLE - 2:g}" font-size="12">{axis.name} {position}</text>'
        )
        drawn += inner
        step = (w if across else h) + (MARGIN if position + 1 < axis.size else 0)
        width, height = (width + step, max(height, h)) if across else (max(width, w), height + step)
    return drawn, width, height


def layout(name: str) -> str:
    """The ranks of a layout in each view of its mesh. Views of the same axes are drawn once."""
    word, further = LAYOUTS[name]
    mesh = mesh_of(word, further)
    views = {tuple((axis.name, axis.size) for axis in axes): view for view, axes in reversed(mesh.views.items())}
    lines: list[str] = []
    x, height = 12.0, 0.0
    for view in reversed(views.values()):
        title = f"{word}: {mesh.world_size} ranks" + (f", the view '{view}'" if len(views) > 1 else "")
        drawn, w, h = boxes(mesh, mesh.views[view], {}, x, 32)
        lines += [f'<text x="{x:g}" y="20" font-size="14">{title}</text>', *drawn]
        x, height = x + max(w, 7.2 * len(title)) + 40, max(height, h)
    size = f'width="{x - 28:g}" height="{height + 44:g}" viewBox="0 0 {x - 28:g} {height + 44:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([head, *lines, "</svg>"]) + "\n"


def curves(recorded: Mapping[str, Any]) -> str:
    """The training losses of both decoders: the mean over seeds, in a band from the smallest to the largest."""
    every, steps = recorded["every"], recorded["steps"]
    losses = {name: [run["loss"] for run in recorded["runs"] if run["decoder"] == name] for name in COLOURS}
    values = [loss for runs in losses.values() for run in runs for loss in run[2:]]  # the first ones are far above
    low, top = int(2 * min(values)) / 2, int(2 * max(values) + 1) / 2

    def place(step: float, loss: float) -> str:
        x = LEFT + (WIDTH - LEFT - 16) * step / steps
        y = TOP + (HEIGHT - TOP - BOTTOM) * (top - min(loss, top)) / (top - low)
        return f"{x:.1f},{y:.1f}"

    def line(values: Sequence[float]) -> list[str]:
        return [place(every * (number + 0.5), value) for number, value in enumerate(values)]

    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="16">training loss, nats per token (mean of {every} steps)</text>',
        f'<text x="{WIDTH - 16}" y="{HEIGHT - 6}" text-anchor="end">step</text>',
    ]
    for number in range(int(2 * low), int(2 * top) + 1):
        y = place(0, number / 2).split(",")[1]
        drawn.append(f'<line x1="{LEFT}" x2="{WIDTH - 16}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        drawn.append(f'<text x="{LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{number / 2:g}</text>')
    for step in range(0, steps + 1, steps // 5):
        x = place(step, low).split(",")[0]
        drawn.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{step}</text>')
    for number, (name, runs) in enumerate(losses.items()):
        columns = list(zip(*runs, strict=True))
        band = [*line([max(one) for one in columns]), *reversed(line([min(one) for one in columns]))]
        mean = line([sum(one) / len(one) for one in columns])
        colour = COLOURS[name]
        drawn.append(f'<polygon points="{" ".join(band)}" fill="{colour}" opacity="0.2"/>')
        drawn.append(f'<polyline points="{" ".join(mean)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        title = f"{name}, {len(runs)} seeds"
        drawn.append(f'<text x="{WIDTH - 150}" y="{TOP + 20 + 18 * number}" fill="{colour}">{title}</text>')
    return "\n".join([*drawn, "</svg>"]) + "\n"


def transfer(runs: Sequence[Mapping[str, Any]]) -> str:
    """The losses of each width by the learning rate, one chart for each parametrization; a dot is the best rate."""
    panel, height = 330, 300
    rates = sorted({run["exponent"] for run in runs})
    of: dict[tuple[str, int], dict[int, float]] = {(run["kind"], run["width"]): {} for run in runs}
    for (kind, width), losses in of.items():
        for rate in rates:
            own = [run["loss"] for run in runs if (run["kind"], run["width"], run["exponent"]) == (kind, width, rate)]
            losses[rate] = sum(own) / len(own)
    values = [loss for losses in of.values() for loss in losses.values()]
    low, top = int(10 * min(values)) / 10, int(10 * max(values) + 1) / 10
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * panel}" height="{height}" '
        f'viewBox="0 0 {2 * panel} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{2 * panel}" height="{height}" fill="#fff"/>',
    ]

    def place(number: int, rate: float, loss: float) -> tuple[float, float]:
        x = number * panel + LEFT + (panel - LEFT - 24) * (rate - rates[0]) / (rates[-1] - rates[0])
        return x, TOP + (height - TOP - BOTTOM) * (top - loss) / (top - low)

    for number, (kind, title) in enumerate((("standard", "without a base model"), ("mup", "with model.mup_base"))):
        drawn.append(f'<text x="{number * panel + LEFT}" y="16">{title}: loss by optimizer.lr</text>')
        for tenth in range(round(10 * low), round(10 * top) + 1):
            (left, y), (right, _) = (place(number, rate, tenth / 10) for rate in (rates[0], rates[-1]))
            drawn.append(f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            drawn.append(f'<text x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{tenth / 10:g}</text>')
        for rate in rates:
            x, y = place(number, rate, low)
            drawn.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">2^{rate}</text>')
        for line, (width, colour) in enumerate(WIDTHS.items()):
            losses = of[kind, width]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(number, *one) for one in losses.items()))
            best = min(losses, key=losses.__getitem__)
            x, y = place(number, best, losses[best])
            drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
            at = number * panel + panel - 100, TOP + 16 + 16 * line
            drawn.append(f'<text x="{at[0]}" y="{at[1]}" fill="{colour}">width {width}</text>')
    return "\n".join([*drawn, "</svg>"]) + "\n"


def needles(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """The share of keys that each run finds, by the length of the text and the depth of the key; darker is more."""
    panel, cell, wide = 250, 26, 44
    depths = next(iter(runs.values()))["depths"]
    height = TOP + cell * len(depths) + BOTTOM
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{len(runs) * panel}" height="{height}" '
        f'viewBox="0 0 {len(runs) * panel} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{len(runs) * panel}" height="{height}" fill="#fff"/>',
    ]
    for number, (title, run) in enumerate(runs.items()):
        left = number * panel + LEFT
        drawn.append(f'<text x="{left}" y="16">{title}</text>')
        for row, depth in enumerate(depths):
            y = TOP + cell * row
            drawn.append(f'<text x="{left - 8}" y="{y + 17}" text-anchor="end">{depth:.0%}</text>')
            for column, shares in enumerate(run["shares"].values()):
                share, x = shares[row], left + wide * column
                fill = "#{:02x}{:02x}{:02x}".format(*(round(244 + share * (end - 244)) for end in (31, 95, 168)))
                colour = "#fff" if share > 0.5 else "#222"
                drawn.append(f'<rect x="{x}" y="{y}" width="{wide - 2}" height="{cell - 2}" fill="{fill}"/>')
                middle = f'x="{x + wide // 2 - 1}" y="{y + 16}" text-anchor="middle" fill="{colour}"'
                drawn.append(f"<text {middle}>{share:.0%}</text>")
        for column, length in enumerate(run["shares"]):
            at = f'x="{left + wide * column + wide // 2 - 1}" y="{height - BOTTOM + 16}" text-anchor="middle"'
            drawn.append(f"<text {at}>{int(length):,}</text>")
    return "\n".join([*drawn, "</svg>"]) + "\n"


def pictures() -> Iterator[tuple[str, str]]:
    """The name and the text of each picture."""
    for name in SCHEDULES:
        yield f"schedule_{name}.svg", schedule(name)
    for name in LAYOUTS:
        yield f"{name}.svg", layout(name)
    yield "mixers.svg", curves(json.loads(CURVES.read_text()))
    yield "transfer.svg", transfer(json.loads(TRANSFER.read_text())["runs"])
    yield "needles.svg", needles(json.loads(NEEDLES.read_text()))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in pictures():
        (FOLDER / file).write_text(text, encoding="utf-8")
