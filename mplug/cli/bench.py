"""mplug bench."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mplug.cli.options import config_options, overrides
from mplug.cli.tables import table
from mplug.errors import UsageError

if TYPE_CHECKING:
    from mplug.bench import Measured, Task
    from mplug.settings import Settings


@click.command()
@config_options
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Steps that are measured.")
@click.option("--warmup", type=click.IntRange(min=1), default=5, show_default=True, help="Steps before them.")
@click.option(
    "--variant",
    "variants",
    metavar="'FIELD=VALUE ...'",
    multiple=True,
    help="Measure with these settings, too; several take turns. '' is the run without changes.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True, help="Turns of each variant.")
@click.option("--profile", is_flag=True, help="Where the time goes, by class of kernel.")
@click.option("--limits", is_flag=True, help="Measure what the machine itself can do, too.")
@click.option("--out", type=click.Path(path_type=Path), help="Write all figures to this file, as JSON.")
def command(
    steps: int,
    warmup: int,
    variants: tuple[str, ...],
    rounds: int,
    profile: bool,
    limits: bool,
    out: Path | None,
    **options: Any,
) -> None:
    """Measure the steps of a run on random tokens, without logs, evaluation or checkpoints.

    Every variant has processes of its own, and they take turns: A B A B. Tokens and TFLOP/s are those of one GPU; A = 6
    counts causal attention once, A = 12 its whole square.

    \b
    mplug bench --preset 1.7b --precision bf16 --set trainer.global_batch_size=4
    mplug bench --variant trainer.compile=inductor --variant trainer.compile=never --rounds 3
    """
    from mplug.bench import Task, as_json
    from mplug.launch import launched
    from mplug.settings import merge, read_assignments

    if launched() is not None:
        raise UsageError("mplug bench starts its own processes; call it without a launcher")
    base = overrides(**options)
    tasks = {
        variant: Task(merge(base, read_assignments(variant.split(), "--variant")), warmup, steps, profile)
        for variant in variants or ("",)
    }
    sizes = {variant: _checked(task.overrides) for variant, task in tasks.items()}
    measured: dict[str, Measured] = {}
    for turn in range(rounds):
        for variant, task in tasks.items():
            click.echo(f"round {turn + 1} of {rounds}: {variant or 'as it is'}", err=True)
            found = _measured(task, sizes[variant])
            measured[variant] = measured[variant].joined(found) if variant in measured else found
    ceilings = _ceilings(next(iter(measured.values())).device) if limits else {}
    click.echo(_rows(measured))
    if profile:
        click.echo(f"\n{_classes(measured)}")
    for what, value in ceilings.items():
        click.echo(f"\n{what}: {value:,.3g}", nl=False)
    click.echo()
    if out is not None:
        out.write_text(json.dumps(as_json(measured, ceilings), indent=2) + "\n")


def _checked(changes: "Settings") -> int:
    """The processes that a variant needs, once its config is found right and its model can be built."""
    from mplug.bench import bench_settings
    from mplug.registry import Registry
    from mplug.resolve import resolve
    from mplug.run import prepare

    run = prepare(resolve(Registry(), bench_settings(), changes))
    from mplug.build import build_model  # imports torch, which a refused config never waits for

    build_model(run)
    return run.mesh.world_size


def _measured(task: "Task", size: int) -> "Measured":
    from mplug.bench import Measured, measure
    from mplug.launch import launch

    found: Measured = launch(size, measure, task)
    return found


def _ceilings(device: str) -> dict[str, float]:
    from mplug.ceilings import ceilings

    return ceilings(device)


def _rows(measured: "dict[str, Measured]") -> str:
    first = next(iter(measured.values()))
    rows = [
        (
            variant or "as it is",
            f"{one.step * 1e3:,.1f}",
            f"{min(one.seconds) * 1e3:,.1f}",
            f"{max(one.seconds) * 1e3:,.1f}",
            f"{one.tokens_per_s:,.0f}",
            f"{one.tflops(one.flops):.3g}",
            f"{one.tflops(one.flops_full):.3g}",
            f"{one.mfu:.1%}" if one.mfu is not None else "-",
            f"{one.memory_gib:.2f}",
            f"{one.tokens_per_s / first.tokens_per_s:.3f}",
        )
        for variant, one in measured.items()
    ]
    header = ("VARIANT", "STEP ms", "MIN", "MAX", "TOKENS/s/GPU", "TFLOP/s A=6", "A=12", "MFU A=6", "GiB", "RATIO")
    return table(header, rows)


def _classes(measured: "dict[str, Measured]") -> str:
    kinds = sorted({kind for one in measured.values() for kind in one.classes})
    rows = [(kind, *(f"{one.classes.get(kind, 0.0) * 1e3:,.1f}" for one in measured.values())) for kind in kinds]
    return table(("MILLISECONDS A STEP", *(variant or "as it is" for variant in measured)), rows)
