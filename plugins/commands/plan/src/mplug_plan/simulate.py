"""The timeline of a predicted step as an HTML page: each stage of the pipeline, its waiting, and what follows.

The page loads nothing. Python draws it; a script of a few lines changes its width.
"""

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mplug import UsageError, write_whole
from mplug_schedules import Action, Kind, Span

if TYPE_CHECKING:
    from mplug_plan.machine import Machine
    from mplug_plan.planned import Planned
    from mplug_plan.step_time import Pass, Step

WIDTH, ROW, TOP = 1600, 34, 30
"""The width of a step in units of the drawing, which fills the window, and in pixels the heights of a row and the axis.
"""
MOST_BOXES = 20_000
"""A page with more boxes is slow in a browser: then it draws the first and the last micro batches."""
MINOR = ' class="minor"'
"""The marks of the axis that the page shows when it is enlarged."""
COLOURS = {
    "forward": "#4f9be8",
    "backward": "#4caf6a",
    "gradients of activations": "#8bd0a0",
    "gradients of weights": "#f0b45a",
    "collectives": "#d8443c",
    "sum of gradients, exposed": "#8f1d17",
    "update": "#8b6be0",
}
KINDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "gradients of activations",
    Kind.WEIGHT_GRADIENT: "gradients of weights",
}


class Box(NamedTuple):
    """A drawn part of a step on a stage: seconds, the class of its colour, and what a pointer shows."""

    stage: int
    start: float
    stop: float
    kind: str
    title: str
    is_communication: bool = False


def write_page(file: Path, planned: "Planned", machine: "Machine") -> None:
    """Write the page of a planned step. UsageError if the file cannot be written."""
    try:
        write_whole(file, page_of(planned, machine))
    except OSError as error:
        raise UsageError(f"cannot write --simulate '{file}': {error.strerror}; use another file") from None


def boxes_of(step: "Step") -> list[Box]:
    """The boxes of a step: the passes of each stage with the collectives that they wait for, and the end of a step."""
    timeline = step.timeline()
    rows = tuple(_rows_of_one(step)) if timeline is None else timeline.rows
    found = [box for stage, row in enumerate(rows) for span in row for box in _of_span(stage, span, step)]
    end = max(box.stop for box in found)
    for name, seconds in step.tail.items():
        if seconds > 0:
            found += [
                Box(stage, end, end + seconds, name, f"{name}: {_ms(seconds)}", "sum" in name)
                for stage in range(len(rows))
            ]
            end += seconds
    return found


def _rows_of_one(step: "Step") -> Iterator[tuple[Span, ...]]:
    """The passes of all micro batches of a run without a pipeline."""
    at, spans = 0.0, []
    (chunk,) = step.chunks
    for number in range(step.micro_batches):
        for kind, seconds in ((Kind.FORWARD, chunk.forward), (Kind.BACKWARD, chunk.backward)):
            spans.append(Span(Action(kind, number), at, at + seconds))
            at += seconds
    yield tuple(spans)


def _of_span(stage: int, span: Span, step: "Step") -> Iterator[Box]:
    action, made = span.action, step.chunks[span.action.chunk]
    kind = KINDS[action.kind]
    waiting = _waiting(action.kind, made)
    title = f"{kind} of micro batch {action.micro_batch}, chunk {action.chunk}: {_ms(span.stop - span.start)}"
    yield Box(stage, span.start, span.stop, kind, title)
    if waiting > 0:
        note = f"collectives that products of this pass wait for: {_ms(waiting)}, drawn together"
        yield Box(stage, span.stop - waiting, span.stop, "collectives", note, True)


def _waiting(kind: Kind, made: "Pass") -> float:
    """The seconds of a pass in which it waits for collectives."""
    if kind is Kind.FORWARD:
        return made.parts.collectives
    return made.parts.collectives_backward if kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT) else 0.0


def page_of(planned: "Planned", machine: "Machine") -> str:
    """The page."""
    step = planned.step
    boxes = boxes_of(step)
    length = max(box.stop for box in boxes)
    stages = 1 + max(box.stage for box in boxes)
    drawn, note = boxes, ""
    if len(boxes) > MOST_BOXES:
        share = MOST_BOXES / len(boxes) / 2
        drawn = [box for box in boxes if box.stop < share * length or box.start > (1 - share) * length]
        note = "The middle of the step repeats itself, and is not drawn. "
    if step.tables is not None and step.drawn < step.micro_batches:
        note += f"{step.drawn:,} of {step.micro_batches:,} micro batches are drawn; the others repeat the steady part."
    height = TOP + stages * ROW + 8
    title = f"{planned.layout or 'one process'} on {planned.gpus:,} GPUs"
    busy = _busy(boxes, stages)
    rows = "\n".join(
        f"<tr><th>{stage}</th><td>{_ms(busy[stage])}</td><td>{busy[stage] / length:.1%}</td></tr>"
        for stage in range(stages)
    )
    parts = "\n".join(
        f"<tr><th>{escape(name)}</th><td>{_ms(seconds)}</td><td>{seconds / step.seconds:.1%}</td></tr>"
        for name, seconds in step.parts.items()
    )
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in _legend(drawn).items()
    )
    values: Mapping[str, str] = {
        "TITLE": escape(title),
        "HEAD": escape(
            f"a step of {planned.seconds:.3g} s; {planned.micro_batches:,} micro batches of "
            f"{planned.micro_batch_size}; {machine.source}"
        ),
        "NOTE": escape(note),
        "LEGEND": legend,
        "TOP": str(TOP),
        "ROW": str(ROW),
        "WIDTH": str(WIDTH),
        "HEIGHT": str(height),
        "NAMES": "\n".join(f"<div>{f'stage {stage}' if stages > 1 else 'a rank'}</div>" for stage in range(stages)),
        "AXIS": "\n".join(
            f'<span{"" if number % 10 == 0 else MINOR} style="left:{number}%">{_ms(number / 100 * length)}</span>'
            for number in range(100)
        ),
        "BOXES": "\n".join((*_lines(height), *(_rect(box, length) for box in drawn))),
        "STAGES": rows,
        "PARTS": parts,
    }
    text = (Path(__file__).parent / "page.html").read_text(encoding="utf-8").split("@@")
    return "".join(values[part] if number % 2 else part for number, part in enumerate(text))


def _busy(boxes: list[Box], stages: int) -> list[float]:
    """The seconds that each stage computes or updates."""
    found = [0.0] * stages
    for box in boxes:
        found[box.stage] += 0.0 if box.is_communication else box.stop - box.start
    return found


def _legend(boxes: list[Box]) -> dict[str, str]:
    names = dict.fromkeys(box.kind for box in boxes)
    return {name: COLOURS[name] for name in names}


def _rect(box: Box, length: float) -> str:
    x, width = box.start / length * WIDTH, (box.stop - box.start) / length * WIDTH
    y, height = TOP + box.stage * ROW, ROW - 14
    if box.is_communication:
        y, height = y + height + 1, 7
    return (
        f'<rect class="{"wait" if box.is_communication else "pass"}" x="{x:.2f}" y="{y}" width="{width:.2f}" '
        f'height="{height}" fill="{COLOURS[box.kind]}"><title>{escape(box.title)}</title></rect>'
    )


def _lines(height: int) -> Iterator[str]:
    for number in range(10):
        x = number / 10 * WIDTH
        yield f'<line x1="{x:g}" x2="{x:g}" y1="0" y2="{height}" vector-effect="non-scaling-stroke"/>'


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"
