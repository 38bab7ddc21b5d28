"""mplug bench."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mplug import UsageError
from mplug.commands import config_options, overrides, table

if TYPE_CHECKING:
    from mplug_bench.ceilings import Limits
    from mplug_bench.measure import Measured, Opponent, Task
    from mplug_bench.profiling import Profile


@click.command()
@config_options
@click.option("--steps", type=click.IntRange(1, 10**6), default=10, show_default=True, help="Steps that are measured.")
@click.option("--warmup", type=click.IntRange(1, 10**6), default=5, show_default=True, help="Steps before them.")
@click.option(
    "--variant",
    "variants",
    metavar="'FIELD=VALUE ...'",
    multiple=True,
    help="Measure with these settings, too; several take turns. '' is the run without changes.",
)
@click.option(
    "--against",
    metavar="'SCRIPT ...'",
    help="A script that trains the same model takes its turns, too: benchmarks/yardstick.py, or one like it. It gets "
    "the run's settings; FIELD=VALUE after its name change them for it.",
)
@click.option(
    "--rounds", type=click.IntRange(1, 10**6), default=1, show_default=True, help="Turns of each participant."
)
@click.option("--profile", is_flag=True, help="Where the time goes, by class of kernel.")
@click.option("--limits", is_flag=True, help="Measure what the machine itself can do with each variant's work, too.")
@click.option("--out", type=click.Path(path_type=Path), help="Write all figures to this file, as JSON.")
def command(
    steps: int,
    warmup: int,
    variants: tuple[str, ...],
    against: str | None,
    rounds: int,
    profile: bool,
    limits: bool,
    out: Path | None,
    **options: Any,
) -> None:
    """Measure the steps of a run on random tokens, without logs, evaluation or checkpoints.

    Every variant has processes of its own, and they take turns: A B A B. Tokens and TFLOP/s are those of one GPU; A = 6
    counts causal attention once, A = 12 its whole square. Ratios of tokens/s are the median over rounds, each with its
    own round of the other; with --against, the smallest and largest are shown, too.

    \b
    mplug bench --preset 1.7b --precision bf16 --set trainer.global_batch_size=4 --profile --limits
    mplug bench --variant trainer.compile=auto --variant trainer.compile=never --rounds 3
    mplug bench --against benchmarks/yardstick.py --rounds 5
    """
    from mplug.commands import Stopped, launched, merge, read_assignments
    from mplug_bench.measure import Opponent, Task, as_json, checked, facts_of
    from mplug_bench.script import Script

    if launched() is not None:
        raise UsageError("mplug bench starts its own processes; call it without a launcher")
    base, script = overrides(**options), Script.read(against) if against is not None else None
    tasks = {
        variant: Task(merge(base, read_assignments(variant.split(), "--variant")), warmup, steps)
        for variant in variants or ("",)
    }
    facts = {variant: facts_of(*checked(task.overrides)) for variant, task in tasks.items()}
    opponent = Opponent.of(script, base, facts) if script is not None else None
    sizes = {variant: one.world_size for variant, one in facts.items()}
    try:
        measured, opposed = _measured(tasks, sizes, opponent, rounds, profile)
        found = _limits(tasks, sizes) if limits else {}
    except Stopped as stop:
        raise SystemExit(128 + stop.signal) from None
    everyone = measured | ({opponent.name: opposed} if opponent and opposed else {})
    click.echo(_rows(everyone, opposed))
    if profile:
        click.echo(f"\n{_classes(everyone)}")
    if found:
        click.echo(f"\n{_fractions(measured, found)}")
    if out is not None:
        out.write_text(json.dumps(as_json(measured, found, opposed), indent=2) + "\n")


def _measured(
    tasks: "dict[str, Task]", sizes: dict[str, int], opponent: "Opponent | None", rounds: int, profile: bool
) -> "tuple[dict[str, Measured], Measured | None]":
    """Measure all participants in turn, round by round; only the first round is profiled, after its steps."""
    from mplug_bench.measure import shown, turn

    measured: dict[str, Measured] = {}
    opposed: Measured | None = None
    for number in range(rounds):
        profiling = profile and number == 0
        for variant, task in tasks.items():
            click.echo(f"round {number + 1} of {rounds}: {shown(variant)}", err=True)
            found = turn(replace(task, profile=profiling), sizes[variant])
            _tell(found)
            measured[variant] = measured[variant].joined(found) if variant in measured else found
        if opponent is not None:
            click.echo(f"round {number + 1} of {rounds}: {opponent.name}", err=True)
            first = next(iter(tasks.values()))
            found = opponent.turn(replace(first, profile=profiling), next(iter(measured.values())).peak_tflops)
            _tell(found)
            opposed = opposed.joined(found) if opposed else found
    return measured, opposed


def _tell(found: "Measured") -> None:
    """Print the result of a turn to stderr at once, before the other turns are complete."""
    click.echo(f"    {found.step * 1e3:,.1f} ms a step, {found.tokens_per_s:,.0f} tokens/s/GPU", err=True)


def _limits(tasks: "dict[str, Task]", sizes: dict[str, int]) -> "dict[str, Limits]":
    from mplug_bench.measure import limits, shown

    found = {}
    for variant, task in tasks.items():
        click.echo(f"limits: {shown(variant)}", err=True)
        found[variant] = limits(task, sizes[variant])
    return found


# Output.


def _rows(everyone: "dict[str, Measured]", opposed: "Measured | None") -> str:
    from mplug_bench.measure import shown

    first = next(iter(everyone.values()))
    header = ["VARIANT", "STEP ms", "MIN", "MAX", "TOKENS/s/GPU", "TFLOP/s A=6", "A=12", "MFU A=6", "GiB", "RATIO"]
    rows = [
        [
            shown(name),
            f"{one.step * 1e3:,.1f}",
            f"{min(one.seconds) * 1e3:,.1f}",
            f"{max(one.seconds) * 1e3:,.1f}",
            f"{one.tokens_per_s:,.0f}",
            f"{one.tflops(one.flops):.3g}",
            f"{one.tflops(one.flops_full):.3g}",
            f"{one.mfu:.1%}" if one.mfu is not None else "-",
            f"{one.memory_gib:.2f}",
            f"{statistics.median(one.ratios(first)):.3f}",
        ]
        for name, one in everyone.items()
    ]
    if opposed is not None:
        header.append(f"TO {list(everyone)[-1]}")
        for row, one in zip(rows, everyone.values(), strict=True):
            ratios = one.ratios(opposed)
            row.append(f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    return table(header, rows)


def _classes(everyone: "dict[str, Measured]") -> str:
    """A table of the milliseconds of each class, and their part of the profiled step."""
    from mplug_bench.measure import shown
    from mplug_bench.profiling import COLLECTIVES, GAPS, PRECEDENCE

    profiles = {shown(name): one.profile for name, one in everyone.items() if one.profile is not None}
    kinds = [kind for kind in (*PRECEDENCE, GAPS) if any(kind in one.classes for one in profiles.values())]
    rows = [[kind, *(_part(one.classes.get(kind, 0.0), one) for one in profiles.values())] for kind in kinds]
    if any(one.collectives for one in profiles.values()):
        rows[kinds.index(COLLECTIVES)][0] += ", exposed"
        rows.append([f"{COLLECTIVES}, hidden ones too", *(_part(one.collectives, one) for one in profiles.values())])
    return table(("MILLISECONDS A STEP", *profiles), rows)


def _part(seconds: float, profile: "Profile") -> str:
    return f"{seconds * 1e3:9,.2f} {seconds / profile.step:7.2%}"


def _fractions(measured: "dict[str, Measured]", limits: "dict[str, Limits]") -> str:
    """A table of the machine's rates, and of each class of a step as a fraction of its limit."""
    from mplug_bench.measure import shown

    found = limits.values()
    rates = dict.fromkeys(what for one in found for what in one.rates)
    rows = [[what, *(f"{one.rates[what]:,.3g}" if what in one.rates else "-" for one in found)] for what in rates]
    for kind in dict.fromkeys(kind for one in found for kind in one.classes):
        cells = [_fraction(one.classes.get(kind), measured[name], kind) for name, one in limits.items()]
        rows.append([f"{kind} alone, ms a step (of what it took)", *cells])
    return table(("LIMITS", *map(shown, limits)), rows)


def _fraction(limit: float | None, measured: "Measured", kind: str) -> str:
    if limit is None:
        return "-"
    took = measured.profile.classes.get(kind) if measured.profile is not None else None
    return f"{limit * 1e3:,.2f}{f' ({limit / took:.1%})' if took else ''}"
