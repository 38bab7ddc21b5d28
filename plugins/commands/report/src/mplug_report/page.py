"""The HTML page. It loads nothing: the script that draws, its data and plotly are inside."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mplug import read_records
from mplug_report.curves import AXES, LARGEST, Curves, curves_of
from mplug_report.settings import differing, settings_of
from mplug_saving import RunSummary, summary_of

HERE = Path(__file__).parent
COLOURS = (
    *("#2f7ed8", "#e8710a", "#2a9d4a", "#c2378e", "#8b6be0"),
    *("#0aa0a8", "#b07d10", "#d8443c", "#6f8799", "#8a9a00"),
)
"""Colours of runs, which have enough contrast on a light and on a dark page; further runs repeat them, dashed."""
PANELS: dict[str, dict[str, Any]] = {
    "loss": {"title": "Training loss", "unit": "nats per token", "smooth": True, "log": True},
    "val_loss": {"title": "Validation loss", "unit": "nats per token", "points": True, "log": True},
    "grad_norm": {"title": "Gradient norm, before clipping", "unit": "norm", "smooth": True, "log": True},
    "lr": {"title": "Learning rate", "unit": "learning rate"},
    "tokens_per_s": {"title": "Speed", "unit": "tokens/s", "smooth": True, "zero": True, "large": True},
    "mfu": {
        "title": "Model FLOPs utilisation (MFU)",
        "unit": "% of the peak",
        "scale": 100,
        "smooth": True,
        "zero": True,
    },
    "tflops": {"title": "Computation", "unit": "TFLOP/s per device", "smooth": True, "zero": True},
    "memory_gib": {"title": "Most memory of a process so far", "unit": "GiB", "zero": True},
    "bubble": {"title": "Pipeline bubble of rank 0", "unit": "% of a step", "scale": 100, "smooth": True, "zero": True},
    "step_s": {"title": "Duration of a step", "unit": "seconds", "smooth": True, "zero": True},
    "data_wait_s": {"title": "Wait for data in a step", "unit": "seconds", "smooth": True, "zero": True},
    "loss_scale": {"title": "Loss scale (fp16)", "unit": "scale", "log": True},
    "overflows": {"title": "Steps lost to overflow (fp16)", "unit": "steps"},
    "skipped": {"title": "Skipped steps", "unit": "share of steps", "zero": True},
}
"""The pictures of known figures, in the order of the page. Every other figure has its name as the title."""
FIGURES = (
    *("Run", "State", "Step", "Loss", "Validation loss", "Tokens/s", "Tokens", "Training time", "Started"),
    *("Model", "Parameters", "Layout"),
)
"""The header of the table of figures."""
MISSING = "–"


def page_of(directories: Sequence[Path]) -> tuple[str, list[str]]:
    """A page that compares the runs in these folders, and sentences about what the page lacks."""
    summaries = [summary_of(directory) for directory in directories]
    curves = [curves_of(read_records(directory / "metrics.jsonl")) for directory in directories]
    names = _distinct(directories)
    missing = [f"the run '{name}' has no steps yet" for name, one in zip(names, curves, strict=True) if not one.values]
    data = {
        "runs": [_run(number, name, one) for number, (name, one) in enumerate(zip(names, curves, strict=True))],
        "panels": _panels(curves),
        "axes": AXES,
    }
    settings = settings_of(directories)
    replaced = {
        "TITLE": escape(f"mplug report: {', '.join(names)}"),
        "STYLE": (HERE / "page.css").read_text(encoding="utf-8"),
        "FIGURES": _table(FIGURES, (_row(*one) for one in zip(names, summaries, curves, strict=True))),
        "DIFFERENCES": _differences(names, settings),
        "SETTINGS": _table(("Setting", *names), ((name, *values) for name, values in settings.items())),
        "WIDTHS": _widths(names, curves),
        "PLOTLY": _plotly(),
        "DATA": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        "SCRIPT": (HERE / "page.js").read_text(encoding="utf-8"),
    }
    parts = (HERE / "page.html").read_text(encoding="utf-8").split("@@")
    return "".join(replaced[part] if number % 2 else part for number, part in enumerate(parts)), missing


def _plotly() -> str:
    """The script of plotly, which cannot end the element that contains it."""
    from plotly.offline import get_plotlyjs  # takes a quarter of a second

    script: str = get_plotlyjs()
    return script.replace("</script", "<\\/script")


def _distinct(directories: Sequence[Path]) -> list[str]:
    """The names of the runs; their paths if two runs have one name."""
    names = [directory.name for directory in directories]
    return names if len(set(names)) == len(names) else [str(directory) for directory in directories]


def _run(number: int, name: str, curves: Curves) -> dict[str, Any]:
    return {
        "name": name,
        "colour": COLOURS[number % len(COLOURS)],
        "dash": ("solid", "dash", "dot", "dashdot")[number // len(COLOURS) % 4],
        "axes": curves.axes,
        "values": {name: [_short(value) for value in column] for name, column in curves.values.items()},
        "loads": {
            "routers": list(curves.loads),
            "values": [[_short(one) for one in row] for row in curves.loads.values()],
        },
    }


def _short(value: float | None) -> float | None:
    """Six digits: more than a picture shows."""
    return None if value is None else float(f"{value:.6g}")


def _panels(curves: Sequence[Curves]) -> list[dict[str, Any]]:
    """The pictures of all figures that a run has: the known ones first, then the load of experts, then the others."""
    found = dict.fromkeys(name for one in curves for name in one.values)
    others = sorted((name for name in found if name not in PANELS), key=lambda name: not name.endswith(LARGEST))
    ordered = [*(name for name in PANELS if name in found), *others]
    return [{"name": name, **PANELS.get(name, _other(name))} for name in ordered]


def _other(name: str) -> dict[str, Any]:
    if name.endswith(LARGEST):
        return {"title": "Load of the busiest expert", "unit": "× the mean load", "note": name, "smooth": True}
    return {"title": name, "unit": "", "smooth": True}


def _row(name: str, summary: RunSummary, curves: Curves) -> tuple[str, ...]:
    seconds = curves.axes["seconds"][-1] if curves.axes["seconds"] else None
    return (
        name,
        summary.state,
        f"{summary.step:,}" + (f" of {summary.steps:,}" if summary.steps is not None else ""),
        _number(summary.loss, ".4f"),
        _number(summary.val_loss, ".4f"),
        _number(summary.tokens_per_s, ",.0f"),
        _number(summary.tokens, ",d"),
        MISSING if seconds is None else _duration(seconds),
        (summary.started or MISSING).replace("T", " ")[:16],
        " ".join(filter(None, (summary.model, summary.preset))) or MISSING,
        _number(summary.parameters, ",d"),
        summary.layout or "one process",
    )


def _number(value: float | None, form: str) -> str:
    return MISSING if value is None else format(value, form)


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"


def _differences(names: Sequence[str], settings: Mapping[str, list[str]]) -> str:
    found = differing(dict(settings))
    if len(names) == 1:
        return "<p>The page shows one run. Give several runs to compare them.</p>"
    if not found:
        return "<p>All settings of these runs are the same.</p>"
    return _table(("Setting", *names), ((name, *values) for name, values in found.items()))


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>"
        + "".join(f"<{_cell(column)}>{escape(cell)}</{_cell(column)}>" for column, cell in enumerate(row))
        + "</tr>\n"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _cell(column: int) -> str:
    return "td" if column else "th"


def _widths(names: Sequence[str], curves: Sequence[Curves]) -> str:
    wide = [f"{name}: means of {one.width} steps" for name, one in zip(names, curves, strict=True) if one.width > 1]
    return f" Points of long runs are means ({escape('; '.join(wide))})." if wide else ""
