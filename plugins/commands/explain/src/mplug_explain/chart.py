"""The pipeline schedule of a run as a chart, with its figures: text for a terminal, or an SVG picture."""

from collections.abc import Iterator
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from mplug import UsageError, counted
from mplug.commands import human_bytes, table
from mplug_schedules import Action, Costs, Table, Timeline, peak, timeline

if TYPE_CHECKING:
    from mplug import Model, Run

COLORS = {"F": "#9ecbff", "B": "#b7e1a1", "I": "#d3f0c3", "W": "#ffd59e"}
LINE = 120
"""Maximum number of characters in a line of a chart."""
TITLE, LEAD = "rank {:<3} ", 9
"""The beginning of a line, and its length."""
WIDTH, HEIGHT, LEFT = 26, 24, 64
"""Pixels of a unit of time, of a row, and of the row's title."""


def table_of(model: "Model", num_micro_batches: int) -> Table:
    """The table of a run's pipeline; UsageError if the run has none."""
    if model.stages.table is None:
        raise UsageError("--schedule: this run has no pipeline schedule; name a pipeline strategy in the layout")
    found = model.stages.table(num_micro_batches)
    if not isinstance(found, Table):
        raise UsageError(
            f"--schedule: the order of actions of this run is a {type(found).__name__}; only a "
            f"mplug_schedules.Table has a chart"
        )
    return found


def report(run: "Run", model: "Model", num_micro_batches: int) -> str:
    """The chart of a step and, for every rank, its peak of activations and the bytes that it sends in a step."""
    from mplug_schedules import bytes_sent  # imports torch

    found = table_of(model, num_micro_batches)
    times = timeline(found, Costs())
    counts = (counted(len(found.rows), "rank"), counted(len(found.ranks), "chunk"), _micro_batches(num_micro_batches))
    head = (
        f"'{model.stages.schedule}': {', '.join(counts)}\n"
        f"bubble {times.bubble:.1%}, if each pass takes one unit of time (B two) and transfers take none"
    )
    if num_micro_batches < len(found.rows):
        head += f"\n{_reason_to_wait(run, num_micro_batches, len(found.rows))}"
    letters = "F forward, B backward, I its half for activations, W its half for weights"
    legend = f"{letters}{', a b ... the chunks of a rank' if len(found.ranks) > len(found.rows) else ''}"
    rows = []
    for rank in range(len(found.rows)):
        sent = bytes_sent(run, model, found, rank)
        figures = (f"{times.busy(rank) / times.length:.1%}", f"{peak(found, rank):g}")
        chunks = ", ".join(map(str, found.chunks_of(rank)))
        rows.append((rank, chunks, *figures, "not known" if sent is None else human_bytes(sent)))
    header = ("RANK", "CHUNKS", "BUSY", "PEAK OF ACTIVATIONS, MICRO BATCHES", "SENT PER STEP")
    return f"{head}\n{legend}\n\n{chart(found, times)}\n\n{table(header, rows)}"


def chart(found: Table, times: Timeline) -> str:
    """A line for each rank; a column for each unit of time. Later columns follow below if they exceed `LINE`."""
    cells = [{round(one.start): (one.action, round(one.stop)) for one in row} for row in times.rows]
    width = max(len(_label(one.action, found)) for row in times.rows for one in row) + 1
    lines = []
    for rank, row in enumerate(cells):
        line, at = TITLE.format(rank), 0
        while at < round(times.length):
            label, stop = (_label(row[at][0], found), row[at][1]) if at in row else ("", at + 1)
            line += label.ljust(width * (stop - at) - 1, "-" if label and stop - at > 1 else " ") + " "
            at = stop
        lines.append(line.rstrip())
    step = (LINE - LEAD) // width * width
    longest = max(len(line) for line in lines) - LEAD
    parts = [
        "\n".join(f"{line[:LEAD]}{line[LEAD:][begin : begin + step]}".rstrip() for line in lines)
        for begin in range(0, longest, step)
    ]
    return "\n\n".join(parts)


def _reason_to_wait(run: "Run", num_micro_batches: int, num_ranks: int) -> str:
    size, (_, shards) = run.micro_batch_size, run.mesh.batch_shard(run.rank)
    remedy = f"trainer.global_batch_size to {num_ranks * shards} or more"
    if size > 1:
        remedy = f"trainer.micro_batch_size to less than {size}, or trainer.global_batch_size to more"
    return f"a step has {_micro_batches(num_micro_batches)} for {num_ranks} ranks, so ranks wait: set {remedy}"


def _micro_batches(number: int) -> str:
    return f"{number} micro {'batch' if number == 1 else 'batches'}"


def _label(action: Action, found: Table) -> str:
    own = found.chunks_of(found.ranks[action.chunk])
    letter = chr(ord("a") + own.index(action.chunk)) if len(own) > 1 else ""
    return f"{action.kind.value}{action.micro_batch}{letter}"


def picture(model: "Model", num_micro_batches: int) -> str:
    """The chart as an SVG."""
    found = table_of(model, num_micro_batches)
    times = timeline(found, Costs())
    width, height = LEFT + round(times.length) * WIDTH + 8, len(found.rows) * HEIGHT + 36
    title = f"{model.stages.schedule}, {num_micro_batches} micro batches: bubble {times.bubble:.1%}"
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    lines = [head, f'<text x="4" y="16" font-size="13">{escape(title)}</text>', *_boxes(found, times), "</svg>"]
    return "\n".join(lines) + "\n"


def _boxes(found: Table, times: Timeline) -> Iterator[str]:
    for rank, row in enumerate(times.rows):
        y = 28 + rank * HEIGHT
        yield f'<text x="4" y="{y + 16}" font-size="12">rank {rank}</text>'
        for one in row:
            x, width = LEFT + one.start * WIDTH, (one.stop - one.start) * WIDTH
            color = COLORS[one.action.kind.value]
            own = found.chunks_of(rank).index(one.action.chunk)
            opacity = 1 - 0.5 * own / len(found.chunks_of(rank))
            yield (
                f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{HEIGHT - 4}" fill="{color}" '
                f'fill-opacity="{opacity:g}" stroke="#555" stroke-width="0.5"><title>{one.action}</title></rect>'
            )
            middle = f'x="{x + width / 2:g}" y="{y + 14}" font-size="10" text-anchor="middle"'
            yield f"<text {middle}>{one.action.kind.value}{one.action.micro_batch}</text>"
