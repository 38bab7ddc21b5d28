"""What `mplug plan` predicts beside what was measured: rows of docs/performance.md, and published runs.

    python benchmarks/plan_rows.py
    python benchmarks/plan_rows.py --limits bench.json --only published

A row has the predicted and the measured step in milliseconds and memory in GiB (of recomputation: the peak of a step
over the memory between steps), each with its error. The predictions
use rates of the chip (built-in, or a file of `mplug bench --limits --out`). Rules and constants of the model were
chosen with these errors in view (docs/planning.md), so the table is no blind test. A published run has TFLOP/s instead;
its memory is not published. `benchmarks/plan_rows.yaml` has the rows.
"""

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from mplug_plan.chips import machine_of
from mplug_plan.machine import Machine
from mplug_plan.planned import Planned, Planner
from mplug_plan.search import search

from mplug import UsageError
from mplug.commands import read_assignments, table

ROWS = Path(__file__).with_suffix(".yaml")


def planned(row: dict[str, Any], base: dict[str, str], gpu: str, limits: Path | None) -> tuple[Planned, Planner]:
    """The prediction of a row. Settings that the row leaves open are those that the plan chooses."""
    words = " ".join([*(base[name] for name in row.get("of", ())), row.get("settings", "")]).split()
    settings: dict[str, str] = {"trainer.precision": "trainer.precision=bf16"}
    for word in words:
        settings[word.partition("=")[0]] = word
    planner = Planner(read_assignments([*settings.values()], "row"), machine_for(row, gpu, limits), row.get("gpus"))
    if row.get("gpus"):
        layout = planner.value("parallel", "layout") or ""
        return planner.built(layout).planned(exact=True), planner
    planner.gpus = planner.prepared(planner.value("parallel", "layout")).mesh.world_size
    found = search(planner)
    if not found.fitting:
        reasons = [f"needs {size / 2**30:.0f} GiB" for size in found.too_large.values()]
        raise UsageError("; ".join([*found.refused.values(), *reasons]))
    return found.fitting[0], planner


def machine_for(row: dict[str, Any], gpu: str, limits: Path | None) -> Machine:
    """The machine of a row: a published run may have had another power limit and another memory."""
    machine = machine_of(gpu, limits, None, None)
    if "watts" in row and machine.power is not None:
        machine = replace(machine, power=replace(machine.power, limit=row["watts"]))
    if "copy_tb" in row:
        slower = row["copy_tb"] * 1e12 / machine.copy_rate
        machine = replace(machine, copy_rate=slower * machine.copy_rate, kernel_rate=slower * machine.kernel_rate)
    return machine


def megatron_flops(planner: Planner) -> float:
    """The FLOPs of a step as Megatron counts them: attention whole (arXiv 2104.04473, without recomputation)."""
    run = planner.prepared(planner.value("parallel", "layout"))
    model, trainer = run.config.model, run.config.trainer
    width, layers, length, vocabulary = model.hidden_size, model.num_layers, trainer.seq_length, model.vocab_size
    tokens = trainer.global_batch_size * length
    return 72 * tokens * layers * width**2 * (1 + length / (6 * width) + vocabulary / (12 * width * layers))


def measured_rows(data: dict[str, Any], limits: Path | None) -> list[tuple[str, ...]]:
    """The rows of docs/performance.md."""
    rows, times, sizes = list[tuple[str, ...]](), list[float](), list[float]()
    for row in data["measured"]["rows"]:
        try:
            one, _ = planned(row, data["base"], data["measured"]["gpu"], limits)
        except UsageError as error:
            rows.append((row["section"], row["name"], "", "", str(error).splitlines()[0][:90], "", "", ""))
            continue
        ms = row.get("ms") or 1e3 * one.tokens / one.gpus / row["tokens"]
        times.append(1e3 * one.seconds / ms - 1)
        cells = (f"{1e3 * one.seconds:,.0f}", f"{ms:,.0f}", f"{times[-1]:+.1%}")
        found = (sum(one.activations.values()) if "peak" in row else one.memory) / 2**30
        memory: tuple[str, ...] = (f"{found:.1f}", "-", "-")
        if size := row.get("peak") or row["gib"]:
            sizes.append(found / size - 1)
            memory = (memory[0], f"{size:.1f}", f"{sizes[-1]:+.1%}")
        rows.append((row["section"], row["name"], *cells, *memory))
    for name, of in (("median of the errors", _median), ("largest error", _largest)):
        rows.append(("", name, "", "", of(times), "", "", of(sizes)))
    rows.append(("", "rows within 8% and 3%", "", "", _within(times, 0.08), "", "", _within(sizes, 0.03)))
    return rows


def published_rows(data: dict[str, Any], limits: Path | None) -> list[tuple[str, ...]]:
    """The published runs."""
    rows, errors = list[tuple[str, ...]](), list[float]()
    for row in data["published"]:
        try:
            one, planner = planned(row, data["base"], row["gpu"], limits)
        except UsageError as error:
            rows.append((row["section"], row["name"], "", "", str(error).splitlines()[0][:90], "", ""))
            continue
        flops = megatron_flops(planner) if row["section"] == "Megatron-Core" else one.flops
        found = one.tokens_per_s if "tokens" in row else flops / one.seconds / one.gpus / 1e12
        reference = row.get("tokens") or row["tflops"]
        errors.append(found / reference - 1)
        chosen = " ".join(word.rpartition(".")[2] for word in one.assignments)
        figures = (f"{found:,.0f}", f"{reference:,.0f}", f"{errors[-1]:+.1%}", f"{one.memory / 2**30:.1f}", chosen)
        rows.append((row["section"], row["name"], *figures))
    rows.append(("", "median of the errors", "", "", _median(errors), "", ""))
    rows.append(("", "largest error", "", "", _largest(errors), "", ""))
    return rows


def _median(errors: list[float]) -> str:
    return f"{statistics.median(map(abs, errors)):.1%}" if errors else "-"


def _largest(errors: list[float]) -> str:
    return f"{max(errors, key=abs):+.1%}" if errors else "-"


def _within(errors: list[float], limit: float) -> str:
    return f"{sum(abs(error) <= limit for error in errors)} of {len(errors)}"


def markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    lines = (header, tuple("---" for _ in header), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", type=Path, help="a file of mplug bench --limits --out")
    parser.add_argument("--markdown", action="store_true", help="print tables as docs/planning.md has them")
    parser.add_argument("--only", choices=["measured", "published"], help="print one table")
    options = parser.parse_args()
    show = markdown if options.markdown else table
    data = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    if options.only != "published":
        header = ("SECTION", "RUN", "PREDICTED ms", "MEASURED", "ERROR", "PREDICTED GiB", "MEASURED", "ERROR")
        print(show(header, measured_rows(data, options.limits)))
    if options.only != "measured":
        header = ("SOURCE", "RUN", "PREDICTED", "PUBLISHED", "ERROR", "GiB", "CHOSEN")
        print(show(header, published_rows(data, options.limits)))


if __name__ == "__main__":
    main()
