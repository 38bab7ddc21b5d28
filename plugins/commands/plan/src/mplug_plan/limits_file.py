"""The limits of a machine from a file of `mplug bench --limits --out FILE`."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from mplug import UsageError
from mplug_plan.machine import Link, Load, Machine, Power

SQUARE = re.compile(r"\w+ product of (\d+) x \1 matrices, TFLOP/s")
BUS = re.compile(r"(all-reduce|all-gather) of (\d+) MiB, bus GB/s")
COPY, ATTENTION, OWN = (
    "copy within memory, read and written, TB/s",
    "attention forward and backward, TFLOP/s",
    "the model's own products, TFLOP/s",
)
BETWEEN = (
    "norm of a sum, read and written, TB/s",
    "gradient of an activation, read and written, TB/s",
)
CPU = "copies in both directions, each, GB/s"
"""Names of the rates in a file of `mplug bench --limits --out`."""
DEEP = re.compile(r"(\S+) product of (\d+) x \2 results, depth (\d+), TFLOP/s")
LENGTH = re.compile(r"attention of (\d+) tokens, forward and backward, TFLOP/s")
GROUPED = re.compile(
    r"grouped (product|gradient of weights) in .*, (\d+) groups of (\d+) rows, (\d+) to (\d+), TFLOP/s"
)
USUAL_DEPTH = 4300
"""The harmonic mean of the inner dimensions of a decoder's products, forward and backward (gpt 1.7b)."""


def measured(machine: Machine, file: Path) -> Machine:
    """The machine with the rates that a file of `mplug bench --limits --out FILE` has."""
    rates, clocks, watts, chip, ranks = _read(file)
    changes: dict[str, Any] = {"source": f"{machine.title} with the limits in {file}"}
    changes |= _of_shapes(rates, clocks)
    if rate := _of_products(rates, changes.get("half_depth", machine.half_depth)):
        changes["product_rate"] = rate
    if COPY in rates:
        changes["copy_rate"] = rates[COPY] * 1e12
    changes |= _of_attention(rates)
    if all(name in rates for name in BETWEEN):
        changes["kernel_rate"] = changes["cast_rate"] = len(BETWEEN) / sum(1 / rates[name] for name in BETWEEN) * 1e12
    if CPU in rates:
        changes["cpu_rate"] = rates[CPU] * 1e9
    if (link := _link(rates)) is not None:
        changes["pair" if ranks == 2 else "node"] = link
    changes["power"] = _power(clocks, watts, chip)
    found = replace(machine, **changes)
    return replace(found, **_grouped(found, rates, clocks))


def _read(file: Path) -> tuple[dict[str, float], dict[str, float], dict[str, float], dict[str, float], int]:
    """(rates, clocks, watts, limits of the chip, ranks) of a file; of a figure in several variants, the first one."""
    figures: dict[str, dict[str, float]] = {kind: {} for kind in ("rates", "clocks", "watts", "chip")}
    try:
        variants = [*json.loads(file.read_text(encoding="utf-8"))["variants"].values()]
        for variant in variants:
            for kind, known in figures.items():
                for name, value in variant.get("limits", {}).get(kind, {}).items():
                    known.setdefault(name, _figure(value, may_be_zero=kind == "watts"))
        ranks = max((int(variant["world_size"]) for variant in variants), default=1)
    except FileNotFoundError:
        raise UsageError(
            f"--limits: '{file}' does not exist; write it by 'mplug bench --limits --out {file}'"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"--limits: '{file}' is not a file of 'mplug bench --limits --out FILE' ({type(error).__name__})"
        ) from None
    if not figures["rates"]:
        raise UsageError(f"--limits: '{file}' has no limits; write it by 'mplug bench --limits --out {file}'")
    return figures["rates"], figures["clocks"], figures["watts"], figures["chip"], ranks


def _figure(value: Any, may_be_zero: bool) -> float:
    """A measured figure; ValueError for what nothing can have measured. Power may be 0: its counter is coarse."""
    number = float(value)
    if not (0 < number < inf or (may_be_zero and number == 0)):
        raise ValueError(value)
    return number


def _power(clocks: Mapping[str, float], watts: Mapping[str, float], chip: Mapping[str, float]) -> Power | None:
    """The clocks and the power of products, attention and copies; None if the file does not have them."""
    names = (OWN, ATTENTION, COPY)
    if len(chip) < 2 or not all(name in clocks for name in names):
        return None
    # The energy counter is coarse. Work that lowers the clock takes what the limit allows.
    limit, largest = chip["power limit, W"], chip["largest clock, MHz"]
    loads = (Load(clocks[name], limit if clocks[name] < 0.98 * largest else min(watts[name], limit)) for name in names)
    return Power(chip["power limit, W"], chip["largest clock, MHz"], *loads)


def _of_attention(rates: Mapping[str, float]) -> dict[str, float]:
    """The rate of attention of long sequences, and the length at which it reaches half of it."""
    seconds = {int(match[1]): int(match[1]) / rate for name, rate in rates.items() if (match := LENGTH.fullmatch(name))}
    if len(seconds) > 1:
        short, long = min(seconds), max(seconds)
        slope = (seconds[long] - seconds[short]) / (long - short)
        return {"attention_rate": 1e12 / slope, "half_length": max(seconds[short] / slope - short, 0.0)}
    return {"attention_rate": rates[ATTENTION] * 1e12, "half_length": 0.0} if ATTENTION in rates else {}


def _of_shapes(rates: Mapping[str, float], clocks: Mapping[str, float]) -> dict[str, float]:
    """What products of several depths say, each at its own clock: `half_depth` and `speedup8`.

    A product of depth K takes (K + half_depth) / rate, so two depths give both.
    """
    seconds: dict[str, dict[int, float]] = {}
    for name, rate in rates.items():
        if match := DEEP.fullmatch(name):
            depth = int(match[3])
            seconds.setdefault(match[1], {})[depth] = depth / rate * clocks.get(name, 1.0)
    eight, usual = seconds.pop("8-bit", {}), next(iter(seconds.values()), {})
    if len(usual) < 2:
        return {}
    low, high = sorted(usual)[1 if len(usual) > 2 else 0], max(usual)
    slope = (usual[high] - usual[low]) / (high - low)
    found = {"half_depth": max(usual[low] / slope - low, 0.0)}
    if len(eight) > 1:
        low, high = min(eight), max(eight)
        found["speedup8"] = min(slope / ((eight[high] - eight[low]) / (high - low)), 2.0)  # the ratio of the peaks
    return found


def _grouped(machine: Machine, rates: Mapping[str, float], clocks: Mapping[str, float]) -> dict[str, Any]:
    """The parts of the rate of single products that grouped ones reach: means over the measured shapes."""
    parts: dict[str, list[float]] = {}
    for name, rate in rates.items():
        if match := GROUPED.fullmatch(name):
            groups, rows, wide, out = map(int, match.groups()[1:])
            sides = (rows, out, wide) if match[1] == "product" else (out, wide, rows)
            single = groups * machine.product(*sides)
            slower = clocks[OWN] / clocks[name] if name in clocks and OWN in clocks else 1.0
            parts.setdefault(match[1], []).append(single * rate * 1e12 * slower / (2 * groups * rows * wide * out))
    names = {"grouped": "product", "grouped_weights": "gradient of weights"}
    return {field: sum(parts[kind]) / len(parts[kind]) for field, kind in names.items() if kind in parts}


def _of_products(rates: Mapping[str, float], half_depth: float) -> float | None:
    """The rate of deep products, from that of a model's own products, or else from the largest square product.

    Small square products do not occupy all multiprocessors equally, so they are left out.
    """
    if OWN in rates:
        return rates[OWN] * 1e12 * (1 + half_depth / USUAL_DEPTH)
    squares = {int(match[1]): rate * 1e12 for name, rate in rates.items() if (match := SQUARE.fullmatch(name))}
    size = max(squares, default=0)
    return squares[size] * (1 + half_depth / size) if squares else None


def _link(rates: Mapping[str, float]) -> Link | None:
    """The link of a node from the bus bandwidths of gatherings (of sums, if there is no gathering)."""
    found: dict[str, dict[float, float]] = {}
    for name, rate in rates.items():
        if match := BUS.fullmatch(name):
            found.setdefault(match[1], {})[int(match[2]) * 2.0**20] = rate * 1e9
    sizes = found.get("all-gather") or found.get("all-reduce")
    if not sizes:
        return None
    large = max(sizes)
    if len(sizes) == 1:
        return Link(sizes[large], 0.0)
    small = min(sizes)
    # A message of n bytes takes `seconds` + n / rate.
    times = {size: size / rate for size, rate in sizes.items()}
    rate = (large - small) / (times[large] - times[small])
    return Link(rate, max(times[small] - small / rate, 0.0))
