"""The limits of the GPUs and links that a plan is for: built-in ones, or those that `mplug bench --limits` measured."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from mplug import UsageError, listed

SQUARE = re.compile(r"\w+ product of (\d+) x \1 matrices, TFLOP/s")
BUS = re.compile(r"(all-reduce|all-gather) of (\d+) MiB, bus GB/s")
COPY, ATTENTION, OWN = (
    "copy within memory, read and written, TB/s",
    "attention forward and backward, TFLOP/s",
    "the model's own products, TFLOP/s",
)
"""Names of the rates in a file of `mplug bench --limits --out`."""
USUAL_DEPTH = 4300
"""The harmonic mean of the inner dimensions of a decoder's products, forward and backward (gpt 1.7b)."""
LAUNCH = 4e-6
"""Seconds between the beginnings of two kernels that do almost nothing."""


@dataclass(frozen=True)
class Link:
    """A GPU's links in one direction: bytes per second, and the seconds until the first bytes of a collective move."""

    bytes_per_s: float
    seconds: float


@dataclass(frozen=True)
class Machine:
    """Limits of a GPU and of its links. Rates are per second: FLOPs, bytes.

    `product_rate` is what products approach if their inner dimension is long; a product whose inner dimension is
    `half_depth` reaches half of it. `speedup8` is the ratio of the peaks of 8-bit and 16-bit products. `source` says
    where the figures are from.
    """

    title: str
    source: str
    memory: float
    peak: float
    speedup8: float
    product_rate: float
    half_depth: float
    attention_rate: float
    copy_rate: float
    gpus_per_node: int
    node: Link
    pair: Link
    network: Link

    def product(self, rows: float, out: float, depth: float, itemsize: int = 2) -> float:
        """Seconds of a product of [rows, depth] and [depth, out]: it computes, or it waits for memory."""
        if not rows * out * depth:
            return 0.0
        faster = self.speedup8 if itemsize == 1 else 1.0
        # The beginning and the end of a tile take as long in 8 bits.
        computing = 2 * rows * out * (depth / faster + self.half_depth) / self.product_rate
        moving = (itemsize * (rows * depth + depth * out) + 2 * rows * out) / self.copy_rate
        return max(computing, moving) + LAUNCH

    def collective(self, num_bytes: float, ranks: int, in_a_node: int) -> float:
        """Seconds of an all-gather or a reduce-scatter whose whole tensor has `num_bytes`.

        `in_a_node` ranks of the group are on each node. If the group spans nodes, each of these ranks has an adapter of
        its own, and the slower of both kinds of link counts.
        """
        if ranks <= 1 or num_bytes <= 0:
            return 0.0
        if ranks <= in_a_node:
            link = self.pair if ranks == 2 else self.node
            rate, seconds = link.bytes_per_s, link.seconds
        else:
            rate = min(self.node.bytes_per_s, in_a_node * self.network.bytes_per_s)
            seconds = self.network.seconds
        return (ranks - 1) / ranks * num_bytes / rate + seconds

    def transfer(self, num_bytes: float, is_near: bool) -> float:
        """Seconds of sending bytes to one other rank, on the same node if `is_near`."""
        link = self.node if is_near else self.network
        return num_bytes / link.bytes_per_s + link.seconds if num_bytes else 0.0


def machine_of(word: str, limits: Path | None, gpus_per_node: int | None, memory_gib: float | None) -> Machine:
    """The built-in limits of the chip that `word` names, with those of a file of `mplug bench --limits`, if any."""
    chips: dict[str, dict[str, Any]] = yaml.safe_load(
        Path(__file__).with_name("chips.yaml").read_text(encoding="utf-8")
    )
    if word.lower() not in chips:
        raise UsageError(
            f"--gpu: no limits of '{word}' are built in (built in: "
            f"{listed(list(chips))}); name one of them, and give the measured limits of your GPU by --limits FILE"
        )
    facts = chips[word.lower()]
    peaks = facts["peak_tflops"]
    found = Machine(
        title=facts["title"],
        source=f"built-in limits of {facts['title']} (chips.yaml has the source of each)",
        memory=(memory_gib or facts["memory_gib"]) * 2**30,
        peak=peaks[2] * 1e12,
        speedup8=peaks[1] / peaks[2],
        product_rate=facts["product_tflops"] * 1e12,
        half_depth=facts["half_depth"],
        attention_rate=facts["attention_tflops"] * 1e12,
        copy_rate=facts["copy_tb"] * 1e12,
        gpus_per_node=gpus_per_node or facts["gpus_per_node"],
        node=Link(facts["node"]["gb_per_s"] * 1e9, facts["node"]["seconds"]),
        pair=Link(facts["pair"]["gb_per_s"] * 1e9, facts["pair"]["seconds"]),
        network=Link(facts["network"]["gb_per_s"] * 1e9, facts["network"]["seconds"]),
    )
    return found if limits is None else _measured(found, limits)


def _measured(machine: Machine, file: Path) -> Machine:
    """The machine with the rates that a file of `mplug bench --limits --out FILE` has."""
    try:
        variants = json.loads(file.read_text(encoding="utf-8"))["variants"].values()
    except FileNotFoundError:
        raise UsageError(
            f"--limits: '{file}' does not exist; write it by 'mplug bench --limits --out {file}'"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"--limits: '{file}' is not a file of 'mplug bench --limits --out FILE' ({type(error).__name__})"
        ) from None
    rates: dict[str, float] = {}
    ranks = 1
    for variant in variants:
        rates |= variant.get("limits", {}).get("rates", {})
        ranks = max(ranks, variant["world_size"])
    if not rates:
        raise UsageError(f"--limits: '{file}' has no limits; write it by 'mplug bench --limits --out {file}'")
    changes: dict[str, Any] = {"source": f"{machine.title} with the limits in {file}"}
    if rate := _of_products(rates, machine.half_depth):
        changes["product_rate"] = rate
    if COPY in rates:
        changes["copy_rate"] = rates[COPY] * 1e12
    if ATTENTION in rates:
        changes["attention_rate"] = rates[ATTENTION] * 1e12
    if (link := _link(rates)) is not None:
        changes["pair" if ranks == 2 else "node"] = link
    return replace(machine, **changes)


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
