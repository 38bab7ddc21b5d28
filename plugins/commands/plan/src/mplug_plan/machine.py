"""The limits of the GPUs and links that a plan is for, and the seconds of work at these limits."""

from dataclasses import dataclass, replace
from typing import NamedTuple

LAUNCH = 4e-6
"""Seconds between the beginnings of two kernels that do almost nothing."""


@dataclass(frozen=True)
class Link:
    """A GPU's links in one direction: bytes per second, and the seconds until the first bytes of a collective move."""

    bytes_per_s: float
    seconds: float


class Load(NamedTuple):
    """The clock (MHz) and the power (watts) of a GPU that does one kind of work alone."""

    mhz: float
    watts: float


@dataclass(frozen=True)
class Power:
    """Why a step has another clock than its parts alone: the whole step must keep to the power limit (watts)."""

    limit: float
    largest_mhz: float
    products: Load
    attention: Load
    memory: Load

    def clock(self, products: float, attention: float, memory: float) -> float:
        """The clock in MHz of a step that spends these seconds, each at the clock of the work alone.

        Power grows with the cube of the clock, because the voltage grows with it. Products and attention take longer at
        a lower clock, and kernels that wait for memory do not.
        """
        parts = ((self.products, products, 1), (self.attention, attention, 1), (self.memory, memory, 0))

        def watts(clock: float) -> float:
            seconds = [time * (load.mhz / clock) ** slowed for load, time, slowed in parts]
            energy = sum(
                time * load.watts * (clock / load.mhz) ** 3 for time, (load, _, _) in zip(seconds, parts, strict=True)
            )
            return energy / max(sum(seconds), 1e-12)

        low, high = 0.3 * self.largest_mhz, self.largest_mhz
        if watts(high) <= self.limit:
            return high
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if watts(middle) <= self.limit else (low, middle)
        return low


@dataclass(frozen=True)
class Machine:
    """Limits of a GPU and of its links. Rates are per second: FLOPs, bytes.

    `product_rate` is what products approach if their inner dimension is long; a product whose inner dimension is
    `half_depth` reaches half of it. So does attention with `attention_rate` and the length `half_length`. `speedup8` is
    the ratio of the rates of 8-bit and 16-bit products. `grouped` and `grouped_weights` are the parts of the rate of
    products that grouped products of torch reach. `kernel_rate` is the rate of kernels between products, `cast_rate`
    that of casts to 8 bits, and `cpu_rate` that of copies to and from the memory of the CPU, each direction. `source`
    says where the figures are from.
    """

    title: str
    source: str
    memory: float
    peak: float
    speedup8: float
    product_rate: float
    half_depth: float
    attention_rate: float
    half_length: float
    copy_rate: float
    kernel_rate: float
    cast_rate: float
    cpu_rate: float
    grouped: float
    grouped_weights: float
    gpus_per_node: int
    node: Link
    pair: Link
    network: Link
    power: Power | None = None

    def at(self, clock: float) -> "Machine":
        """The machine at another clock (MHz) than those at which its rates were measured."""
        assert self.power is not None
        return replace(
            self,
            product_rate=self.product_rate * clock / self.power.products.mhz,
            attention_rate=self.attention_rate * clock / self.power.attention.mhz,
            power=None,
        )

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
