"""mplug plan."""

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mplug.commands import Finite, UserPath, config_options

if TYPE_CHECKING:
    from mplug.commands import Settings
    from mplug_plan.planned import Planned, Planner
    from mplug_plan.search import Search

BATCH_TOKENS = 4_194_304
"""Tokens of a step of a plan whose global batch is not set: the batch of Llama 2 (arXiv 2307.09288)."""
REASONS = 6
"""The number of layouts that are left out and named with their reason."""


@click.command()
@config_options
@click.option("--gpus", type=click.IntRange(1, 1 << 20), default=8, show_default=True, help="Number of GPUs.")
@click.option("--gpu", "chip", default="h100", show_default=True, help="The GPU whose limits are built in: h100, h200.")
@click.option(
    "--limits",
    type=UserPath(dir_okay=False),
    help="Use the limits in this file of 'mplug bench --limits --out FILE' instead of the built-in ones.",
)
@click.option("--gpus-per-node", type=click.IntRange(1, 1 << 10), help="GPUs of a machine (built in: 8).")
@click.option("--memory", type=Finite(1, 1e6), help="GiB of a GPU, instead of the built-in figure.")
@click.option("--top", type=click.IntRange(1, 100), default=10, show_default=True, help="Number of layouts to show.")
@click.option("--simulate", type=UserPath(dir_okay=False), help="Draw the best step as a timeline, in this HTML file.")
@click.option("--out", type=UserPath(dir_okay=False), help="Write all figures to this file, as JSON.")
def command(
    gpus: int,
    chip: str,
    limits: Path | None,
    gpus_per_node: int | None,
    memory: float | None,
    top: int,
    simulate: Path | None,
    out: Path | None,
    **options: Any,
) -> None:
    """Find the layouts in which a model fits a number of GPUs, the fastest first, with the command to run each.

    Memory and step time are predicted, without GPUs: from the model's plan, the placements and bytes of each layout,
    and the tables of pipeline schedules, as 'mplug train' would use them; and from the limits of a GPU and of its
    links. The host checks each layout, so it accepts the shown ones, and its refusals are shown. With --parallel, the
    command predicts this layout alone. Settings that you give stay as they are; the plan chooses the others (micro
    batch, recomputation, schedule).

    \b
    mplug plan --model llama --preset 3-8b --gpus 64 --gpu h100
    mplug plan --model llama --preset 3.1-405b --gpus 16384 --batch-size 2048 --simulate step.html
    mplug plan --preset 7.1b --gpus 2 --gpu h200 --limits bench.json --parallel zero2
    """
    from mplug import UsageError, write_whole
    from mplug.commands import overrides
    from mplug_plan.chips import machine_of
    from mplug_plan.planned import Planner
    from mplug_plan.search import search
    from mplug_plan.simulate import write_page

    _refuse_unwritable({"--simulate": simulate, "--out": out})
    machine = machine_of(chip, limits, gpus_per_node, memory)
    given = overrides(**options)
    planner = Planner(_with_defaults(given), machine, gpus)
    _set_batch(planner, given)
    with _progress() as report:
        found = search(planner, report)
    click.echo(_head(planner, found))
    if not found.fitting:
        click.echo(_left_out(planner, found), err=True)
        click.echo(f"mplug: no layout fits; {_remedy(found)}", err=True)
        raise SystemExit(2)
    shown = found.fitting[:top]
    click.echo(_rows(planner, shown))
    click.echo(f"\n{_reasons(shown[0])}\n")
    if planner.unknown:
        click.echo(f"The time of {planner.unknown} is not known, so a step takes longer than is shown.\n")
    for number, one in enumerate(shown[:3], 1):
        click.echo(f"{number}  {run_command(planner, given, one)}")
    if text := _left_out(planner, found):
        click.echo(f"\n{text}")
    if simulate is not None:
        write_page(simulate, shown[0], machine)
        click.echo(f"\nwrote {simulate}: the step of '{shown[0].layout or 'one process'}'; open it in a browser")
    if out is not None:
        text = json.dumps(_as_json(planner, given, found, top), indent=2) + "\n"
        try:
            write_whole(out, text.encode())
        except OSError as error:
            raise UsageError(f"cannot write --out '{out}': {error.strerror}; use another file") from None


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """On a terminal, a line that shows what the block reports."""
    from rich.console import Console

    with Console(stderr=True).status("planning") as status:  # nothing where standard error is no terminal
        yield lambda text: status.update(f"planning: {text}")


def _remedy(found: "Search") -> str:
    """What a user may change if no layout fits."""
    if not found.too_large:
        return "change what the reasons above name"
    return (
        "use more GPUs or GPUs with more memory, or keep less: --adapt lora, --set optimizer.moments=8bit, "
        "--set optimizer.offload={}, or a smaller trainer.seq_length"
    )


def _refuse_unwritable(files: "dict[str, Path | None]") -> None:
    """Raise UsageError, before a long search, if the folder of a file does not exist."""
    from mplug import UsageError

    for option, file in files.items():
        if file is not None and not file.parent.is_dir():
            raise UsageError(f"cannot write {option} '{file}': its folder does not exist; make it, or use another file")


def _with_defaults(given: "Settings") -> "Settings":
    """The settings with bf16, unless the user names a precision."""
    from mplug.commands import merge, read_assignments

    return merge(read_assignments(["trainer.precision=bf16"], "plan"), given)


def _set_batch(planner: "Planner", given: "Settings") -> None:
    """Choose the global batch if the user does not: about BATCH_TOKENS, and a multiple of the number of GPUs."""
    from mplug.commands import merge, read_assignments

    if ("trainer", "global_batch_size") in given:
        return
    length = planner.prepared_alone().config.trainer.seq_length
    gpus = planner.gpus or 1
    samples = max(round(BATCH_TOKENS / length / gpus), 1) * gpus
    planner.settings = merge(planner.settings, read_assignments([f"trainer.global_batch_size={samples}"], "plan"))


def _head(planner: "Planner", found: "Search") -> str:
    config = planner.prepared_alone().config
    trainer = config.trainer
    layouts = "layout" if found.considered == 1 else "layouts"
    samples, length = trainer.global_batch_size, trainer.seq_length
    kernels = ""
    if planner.kernels.assumed:
        kernels = f"\nkernels that need a GPU are not checked here: {', '.join(planner.kernels.assumed)}"
    gpus = "1 GPU" if planner.gpus == 1 else f"{planner.gpus:,} GPUs, {planner.machine.gpus_per_node} in a node"
    return (
        f"{gpus}; {planner.machine.source}\n"
        f"a step: {samples:,} samples of {length:,} tokens ({samples * length:,} tokens); precision "
        f"{trainer.precision}; {found.considered:,} {layouts} considered{kernels}\n"
    )


def _rows(planner: "Planner", shown: "list[Planned]") -> str:
    from mplug.commands import table

    header = (
        "",
        "LAYOUT",
        "SETTINGS",
        "STEP s",
        "TOKENS/s/GPU",
        "MFU",
        "GiB",
        "OF",
        "MICRO BATCHES",
        "BUBBLE",
        "WAITS",
    )
    rows = []
    for number, one in enumerate(shown, 1):
        parts, seconds = one.step.parts, one.seconds
        waits = sum(parts[name] for name in parts if "products wait" in name or "between ranks" in name)
        rows.append(
            (
                number,
                one.layout or "one process",
                _words(one),
                f"{seconds:#.3g}" if seconds < 100 else f"{seconds:,.0f}",
                f"{one.tokens_per_s:,.0f}",
                f"{one.mfu(planner.machine.peak):.1%}",
                f"{one.memory / 2**30:.1f}",
                f"{planner.limit / 2**30:.1f}",
                f"{one.micro_batches} of {one.micro_batch_size}",
                f"{parts['bubble'] / seconds:.1%}",
                f"{waits / seconds:.1%}",
            )
        )
    return table(header, rows)


SHORT = {
    "memory.recompute.mode=full": "recompute",
    "parallel.zero.stage=2": "stage 2",
}


def _words(one: "Planned") -> str:
    """The settings of a row in short."""
    words = []
    for assignment in one.assignments:
        name, _, value = assignment.partition("=")
        if name == "trainer.micro_batch_size":
            continue
        words.append(
            SHORT.get(assignment, value if name.endswith("schedule") else f"{name.rpartition('.')[2]}={value}")
        )
    return ", ".join(words) or "-"


def _reasons(one: "Planned") -> str:
    """Where the time and the memory of a run go."""
    from mplug.commands import human_bytes, table

    time = [(name, f"{1e3 * seconds:,.1f}", f"{seconds / one.seconds:.1%}") for name, seconds in one.step.parts.items()]
    time.append(("collectives beside computation", f"{1e3 * one.step.hidden:,.1f}", "hidden"))
    held = [(name, human_bytes(size)) for name, size in {**one.held, **one.activations}.items()]
    title = f"The step and the memory of '{one.layout or 'one process'}'"
    return f"{title}\n\n{table(('OF A STEP', 'ms', 'PART'), time)}\n\n{table(('OF A GPU', 'SIZE'), held)}"


def run_command(planner: "Planner", given: "Settings", one: "Planned") -> str:
    """The command that trains a planned run with the user's settings."""
    flags = {("model", "name"): "--model", ("model", "preset"): "--preset", ("trainer", "precision"): "--precision"}
    settings = {**{key: setting.value for key, setting in given.items()}}
    settings.setdefault(("trainer", "precision"), "bf16")
    settings.setdefault(("trainer", "global_batch_size"), planner.value("trainer", "global_batch_size"))
    settings.pop(("parallel", "layout"), None)
    words = ["mplug", "train"]
    for key, flag in flags.items():
        if key in settings:
            words += [flag, str(settings.pop(key))]
    words += ["--parallel", one.layout] if one.layout else []
    own = {assignment.partition("=")[0]: assignment for assignment in one.assignments}
    rest = {".".join(key): f"{'.'.join(key)}={_plain(value)}" for key, value in settings.items()}
    for assignment in {**rest, **own}.values():
        words += ["--set", assignment]
    return shlex.join(words)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _left_out(planner: "Planner", found: "Search") -> str:
    """Why layouts are left out."""
    lines = []
    if found.too_large:
        smallest = sorted(found.too_large.items(), key=lambda pair: pair[1])[:REASONS]
        named = ", ".join(f"{layout} ({size / 2**30:,.0f} GiB)" for layout, size in smallest)
        lines.append(
            f"{len(found.too_large)} need more than {planner.limit / 2**30:.1f} GiB, also with recomputation: {named}"
            f"{' ...' if len(found.too_large) > REASONS else ''}"
        )
    if found.refused:
        lines.append(f"{len(found.refused)} are refused by 'mplug train':")
        lines += [f"  {layout}: {reason}" for layout, reason in list(found.refused.items())[:REASONS]]
    if found.not_built:
        lines.append(f"{found.not_built} are slower by a rough estimate, and were not built")
    return "Left out:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""


def _as_json(planner: "Planner", given: "Settings", found: "Search", top: int) -> dict[str, Any]:
    return {
        "machine": planner.machine.source,
        "gpus": planner.gpus,
        "layouts": [
            {
                "layout": one.layout,
                "assignments": list(one.assignments),
                "seconds": one.seconds,
                "parts": one.step.parts,
                "hidden": one.step.hidden,
                "bytes": one.memory,
                "held": one.held,
                "activations": one.activations,
                "tokens_per_s_per_gpu": one.tokens_per_s,
                "mfu": one.mfu(planner.machine.peak),
                "command": run_command(planner, given, one),
            }
            for one in found.fitting[:top]
        ],
        "too_large": found.too_large,
        "refused": found.refused,
        "not_built": found.not_built,
    }
