"""mplug bench."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mplug import UsageError
from mplug.commands import UserPath, config_options, overrides, table

if TYPE_CHECKING:
    from mplug_bench.ceilings import Limits
    from mplug_bench.measure import Measured, Opponent, Task
    from mplug_bench.profiling import Profile


@click.command()
@config_options
@click.option(
    "--steps",
    type=click.IntRange(0, 10**6),
    default=10,
    show_default=True,
    help="Number of measured steps; 0 with --limits measures the limits alone.",
)
@click.option(
    "--warmup",
    type=click.IntRange(1, 10**6),
    default=5,
    show_default=True,
    help="Number of unmeasured steps before them.",
)
@click.option(
    "--variant",
    "variants",
    metavar="'FIELD=VALUE ...'",
    multiple=True,
    help="Measure with these changed settings; repeat the option to compare variants, which take turns. '' is the run "
    "without changes.",
)
@click.option(
    "--against",
    metavar="'SCRIPT ...'",
    help="Also measure a script that trains the same model, in turns with the variants: for example "
    "benchmarks/yardstick.py. It receives the run's settings; FIELD=VALUE after its name changes them for it.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 10**6),
    default=1,
    show_default=True,
    help="Number of turns of each variant and of the script.",
)
@click.option("--profile", is_flag=True, help="Show the time of a step by class of kernel.")
@click.option("--limits", is_flag=True, help="Also measure the limits of the machine for each variant's work.")
@click.option("--out", type=UserPath(), help="Write all figures to this file, as JSON.")
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

    Each variant runs in its own processes, and variants take turns: A B A B. Tokens and TFLOP/s are per GPU; A = 6
    counts causal attention once, A = 12 counts its full square. RATIO is the median, over rounds, of the ratio of
    tokens/s to those of the first variant in the same round; with --against, the smallest and largest are shown too.
    BUBBLE, under pp, is the part of a step, between a rank's first pass and its last one, in which the rank computes no
    pass.

    \b
    mplug bench --preset 1.7b --precision bf16 --set trainer.global_batch_size=4 --profile --limits
    mplug bench --variant trainer.compile=auto --variant trainer.compile=never --rounds 3
    mplug bench --against benchmarks/yardstick.py --rounds 5
    """
    from mplug.commands import Stopped, launched, merge, read_assignments
    from mplug_bench.measure import Opponent, Task, as_json, checked, facts_of
    from mplug_bench.script import Script

    if launched() is not None:
        raise UsageError(
            "mplug bench starts its own processes, and a launcher has started this one; run it without one"
        )
    if steps == 0 and not limits:
        raise UsageError("--steps 0 measures no step; add --limits to measure the limits of the machine alone")
    if steps == 0 and (against is not None or profile):
        raise UsageError("--steps 0 measures no step, so --against and --profile have no effect; remove them")
    base, script = overrides(**options), Script.read(against) if against is not None else None
    tasks = {
        variant: Task(merge(base, read_assignments(variant.split(), "--variant")), warmup, steps)
        for variant in variants or ("",)
    }
    facts = {variant: facts_of(*checked(task.overrides)) for variant, task in tasks.items()}
    opponent = Opponent.of(script, base, facts) if script is not None else None
    try:
        measured, opposing = _measured(tasks, opponent, rounds, profile) if steps else ({}, None)
        ceilings = _limits(tasks) if limits else {}
    except Stopped as stop:
        raise SystemExit(128 + stop.signal) from None
    everyone = measured | ({opponent.name: opposing} if opponent and opposing else {})
    if everyone:
        click.echo(_rows(everyone, opposing))
    if profile:
        click.echo(f"\n{_classes(everyone)}")
        for line in _waits(measured):
            click.echo(line)
    if ceilings:
        click.echo(f"\n{_fractions(measured, ceilings)}")
    if out is not None:
        out.write_text(json.dumps(as_json(facts, measured, ceilings, opposing), indent=2) + "\n")


def _measured(
    tasks: "dict[str, Task]", opponent: "Opponent | None", rounds: int, profile: bool
) -> "tuple[dict[str, Measured], Measured | None]":
    """Measure all participants in turn, round by round; only the first round is profiled, after its steps."""
    from mplug_bench.measure import shown, turn

    measured: dict[str, Measured] = {}
    opposing: Measured | None = None
    for number in range(rounds):
        profiling = profile and number == 0
        for variant, task in tasks.items():
            click.echo(f"round {number + 1} of {rounds}: {shown(variant)}", err=True)
            result = turn(replace(task, profile=profiling))
            _report(result)
            measured[variant] = measured[variant].joined(result) if variant in measured else result
        if opponent is not None:
            click.echo(f"round {number + 1} of {rounds}: {opponent.name}", err=True)
            first = next(iter(tasks.values()))
            result = opponent.turn(replace(first, profile=profiling), next(iter(measured.values())).peak_tflops)
            _report(result)
            opposing = opposing.joined(result) if opposing else result
    return measured, opposing


def _report(result: "Measured") -> None:
    """Print the result of a turn to stderr at once, before the other turns are complete."""
    click.echo(f"    {result.step * 1e3:,.1f} ms per step, {result.tokens_per_s:,.0f} tokens/s/GPU", err=True)


def _limits(tasks: "dict[str, Task]") -> "dict[str, Limits]":
    from mplug_bench.measure import limits, shown

    ceilings = {}
    for number, (variant, task) in enumerate(tasks.items()):
        click.echo(f"limits: {shown(variant)}", err=True)
        ceilings[variant] = limits(replace(task, of_machine=number == 0))
    return ceilings


# Output.


def _rows(everyone: "dict[str, Measured]", opposing: "Measured | None") -> str:
    from mplug_bench.measure import shown

    first = next(iter(everyone.values()))
    header = ["VARIANT", "STEP ms", "MIN", "MAX", "TOKENS/s/GPU", "TFLOP/s A=6", "A=12", "MFU A=6", "GiB", "RATIO"]
    rows = [
        [
            shown(name),
            f"{participant.step * 1e3:,.1f}",
            f"{min(participant.seconds) * 1e3:,.1f}",
            f"{max(participant.seconds) * 1e3:,.1f}",
            f"{participant.tokens_per_s:,.0f}",
            f"{participant.tflops(participant.flops):.3g}",
            f"{participant.tflops(participant.flops_full):.3g}",
            f"{participant.mfu:.1%}" if participant.mfu is not None else "-",
            f"{participant.memory_gib:.2f}",
            f"{statistics.median(participant.ratios(first)):.3f}",
        ]
        for name, participant in everyone.items()
    ]
    for figure in dict.fromkeys(name for one in everyone.values() for name in one.figures):
        header.append(figure.upper())
        for row, one in zip(rows, everyone.values(), strict=True):
            row.append(f"{one.figures[figure]:.3f}" if figure in one.figures else "-")
    if opposing is not None:
        header.append(f"TO {list(everyone)[-1]}")
        for row, one in zip(rows, everyone.values(), strict=True):
            ratios = one.ratios(opposing)
            row.append(f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    return table(header, rows)


def _classes(everyone: "dict[str, Measured]") -> str:
    """A table of the milliseconds of each class, and their part of the profiled step."""
    from mplug_bench.measure import shown
    from mplug_bench.profiling import COLLECTIVES, GAPS, PRECEDENCE

    profiles = {
        shown(name): participant.profile for name, participant in everyone.items() if participant.profile is not None
    }
    kinds = [kind for kind in (*PRECEDENCE, GAPS) if any(kind in one.classes for one in profiles.values())]
    rows = [[kind, *(_part(one.classes.get(kind, 0.0), one) for one in profiles.values())] for kind in kinds]
    if any(profile.collectives for profile in profiles.values()):
        rows[kinds.index(COLLECTIVES)][0] += ", exposed"
        rows.append([f"{COLLECTIVES}, exposed and hidden", *(_part(one.collectives, one) for one in profiles.values())])
    return table(("MS PER STEP", *profiles), rows)


def _waits(measured: "dict[str, Measured]") -> list[str]:
    """A line for each variant on a GPU: how often the CPU waits for it in a step, and where."""
    from mplug_bench.measure import shown

    lines = []
    for name, one in measured.items():
        if one.waits is not None:
            places = ", ".join(f"{place} ({number})" for place, number in one.waits.items())
            lines.append(f"waits of the CPU per step: {sum(one.waits.values())}{f': {places}' if places else ''}")
            lines[-1] += f" [{shown(name)}]"
    return lines


def _part(seconds: float, profile: "Profile") -> str:
    return f"{seconds * 1e3:9,.2f} {seconds / profile.step:7.2%}"


def _fractions(measured: "dict[str, Measured]", limits: "dict[str, Limits]") -> str:
    """A table of the machine's rates, and of each class of a step as a fraction of its limit."""
    from mplug_bench.measure import shown

    ceilings = limits.values()
    rates = dict.fromkeys(rate for ceiling in ceilings for rate in ceiling.rates)
    rows = [[rate, *(_rate(each, rate) for each in ceilings)] for rate in rates]
    for kind in dict.fromkeys(kind for ceiling in ceilings for kind in ceiling.classes):
        cells = [_fraction(ceiling.classes.get(kind), measured.get(name), kind) for name, ceiling in limits.items()]
        rows.append([f"{kind} alone, ms per step (% of the measured time)", *cells])
    return table(("LIMITS", *map(shown, limits)), rows)


def _rate(limits: "Limits", name: str) -> str:
    """A rate, and the clock of the GPU at which it was measured, if that is known."""
    if name not in limits.rates:
        return "-"
    clock = limits.clocks.get(name)
    return f"{limits.rates[name]:,.3g}{f' ({clock:,.0f} MHz, {limits.watts[name]:,.0f} W)' if clock else ''}"


def _fraction(limit: float | None, measured: "Measured | None", kind: str) -> str:
    if limit is None:
        return "-"
    took = measured.profile.classes.get(kind) if measured is not None and measured.profile is not None else None
    return f"{limit * 1e3:,.2f}{f' ({limit / took:.1%})' if took else ''}"
