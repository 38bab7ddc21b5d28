"""The result of an evaluation as a table, and as JSON."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mplug import RunError, UsageError, write_whole
from mplug.commands import table

if TYPE_CHECKING:
    from mplug_evaluate.work import Found, Measured

OF_ACCURACY = ("accuracy", "most common", "unigram loss")
COLUMNS = ("data", "documents", "tokens", "loss", "perplexity", "bytes", "bits/byte")


def refuse_unwritable(output: Path) -> None:
    """Raise UsageError, before a long computation, if a file cannot be written."""
    if not output.parent.is_dir():
        raise UsageError(f"cannot write --output '{output}': its folder does not exist; make it, or use another file")


def report(found: "Found", output: Path | None) -> None:
    """Print the table, and write the file. RunError afterwards if a loss is not finite."""
    rows = [*found.rows, *([found.total] if len(found.rows) > 1 else [])]
    click.echo(_of_scores(found.rows) if found.has_scores else _of_tokens(rows))
    if found.averages:
        click.echo(f"of the averages of the weights in '{found.weights}' (trainer.eval_averages=false: of the weights)")
    if found.has_scores:
        click.echo(f"loss and figures are those of {found.objective}, means over the targets")
    elif found.objective is not None:
        click.echo(f"the loss is the model's own, of all targets alike; the run trains by that of {found.objective}")
    if output is not None:
        text = json.dumps(_plain(found), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            write_whole(output, text.encode())
        except OSError as error:
            raise RunError(f"cannot write --output '{output}': {error.strerror}") from None
    wrong = [one.name for one in found.rows if not math.isfinite(one.loss)]
    if wrong:
        raise RunError(f"the loss of {wrong[0]} is not finite: the weights or the precision do not serve this data")


def _of_tokens(rows: "list[Measured]") -> str:
    with_accuracy = rows[0].shares is not None
    columns = (*COLUMNS, *(OF_ACCURACY if with_accuracy else ()))
    return table(columns, [[*_cells(one), *(_shares(one) if with_accuracy else ())] for one in rows])


def _of_scores(rows: "Sequence[Measured]") -> str:
    """Pairs or texts in the place of tokens, and the figures of the objective."""
    names = [*rows[0].figures]
    cells = [[one.name, f"{one.num_tokens:,}", f"{one.loss:.4f}", *_numbers(one, names)] for one in rows]
    return table(("data", "targets", "loss", *names), cells)


def _numbers(one: "Measured", names: list[str]) -> list[str]:
    return [f"{one.figures[name]:.4f}" for name in names]


def _cells(one: "Measured") -> list[str]:
    sizes = ["-" if size is None else f"{size:,}" for size in (one.num_documents, one.num_tokens, one.num_bytes)]
    bits = "-" if one.bits_per_byte is None else f"{one.bits_per_byte:.4f}"
    return [one.name, sizes[0], sizes[1], f"{one.loss:.4f}", f"{one.perplexity:.4f}", sizes[2], bits]


def _shares(one: "Measured") -> list[str]:
    if one.shares is None:
        return ["-"] * len(OF_ACCURACY)
    return [f"{one.shares.accuracy:.1%}", f"{one.shares.most_common:.1%}", f"{one.shares.unigram_loss:.4f}"]


def _plain(found: "Found") -> dict[str, Any]:
    return {
        "weights": found.weights,
        "averages": found.averages,
        "layout": found.layout,
        "precision": found.precision,
        "seq_length": found.seq_length,
        "stride": found.stride,
        "loss_of": found.objective if found.has_scores else None,
        "results": [_fields(one) for one in found.rows],
        "total": _fields(found.total),
    }


def _fields(one: "Measured") -> dict[str, Any]:
    return {
        "data": one.name,
        "documents": one.num_documents,
        "tokens": one.num_tokens,
        "loss": _finite(one.loss),
        "perplexity": None if one.figures else _finite(one.perplexity),
        "bytes": one.num_bytes,
        "bits_per_byte": _finite(one.bits_per_byte),
        **({} if one.shares is None else one.shares._asdict()),
        **({"figures": {name: _finite(value) for name, value in one.figures.items()}} if one.figures else {}),
    }


def _finite(number: float | None) -> float | None:
    """The number; None if JSON has no form for it."""
    return number if number is not None and math.isfinite(number) else None
