"""Heads exchanged by copies between the memories of ranks, on CPUs, with memory that processes share."""

import re
from typing import Any

import file_memory
import pytest
import torch
import torch.distributed as dist
from layout_runs import assert_refused, difference_of
from mplug_cp import swaps, wraps
from torch import Tensor

from mplug_testing import run_workers
from mplug_testing.harness import train_steps

COPIES = "parallel.cp.method=ulysses parallel.cp.transport=copy_engines"
SMALL: dict[str, Any] = {"model.num_layers": 2, "model.num_kv_heads": 4}


def on_cpus() -> None:
    file_memory.install()
    wraps.exchange_by_copies = exchange_by_copies


def exchange_by_copies(_: Any, group: Any) -> None:
    if group is not None:
        swaps.BY_COPIES[group.group_name] = swaps.CopySwaps(group)


@pytest.mark.wide("layouts")
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("cp2 parallel.cp.head_chunks=2", SMALL),
        pytest.param("cp2", SMALL, marks=pytest.mark.wide("layouts")),
        pytest.param("cp4", {**SMALL, "memory.recompute.mode": "full"}, marks=pytest.mark.wide("layouts")),
        pytest.param("zero2cp2 parallel.cp.head_chunks=2", SMALL, marks=pytest.mark.wide("layouts")),
        pytest.param("cp2pp2 parallel.pp.schedule=zb-h1", SMALL, marks=pytest.mark.wide("layouts")),
    ],
)
def test_copies_give_the_run_of_one_process(layout: str, settings: dict[str, Any]) -> None:
    assert difference_of(f"{layout} {COPIES}", settings, on_cpus) == ""


def exchanged(_: Any) -> list[bool]:
    """Be one rank: whether 12 exchanges of several sizes in each direction, two in flight, bring what ranks have sent.

    Those of one direction are taken while those of the other are under way.
    """
    on_cpus()
    group: Any = dist.group.WORLD
    rank, copies, found, under_way = dist.get_rank(), swaps.CopySwaps(group), list[bool](), list[Any]()

    def sent(number: int, heads: int, of: int, to: int) -> Tensor:
        shape = 2, 3, heads, 4 + 3 * (number % 2)  # a head dim of 7 has no words of 16 bytes
        return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + 1000 * number + 100 * of + to

    def check() -> None:
        number, coming, leaving = under_way.pop(0)
        arrived: Tensor = coming.wait()
        expected = [torch.cat([sent(number, heads, of, rank) for heads in (2, 1)], 2) for of in (0, 1)]
        with leaving.arrived() as parts:
            back = all(
                torch.equal(part, sent(number, heads, of, rank))
                for heads, ranks in zip((2, 1), parts, strict=True)
                for of, part in enumerate(ranks)
            )
        found.append(torch.equal(arrived, torch.stack(expected)) and back)

    for number in range(12):
        xs = [torch.stack([sent(number, heads, rank, to) for to in (0, 1)]) for heads in (2, 1)]
        arriving = xs[0].new_empty(2, 2, 3, 3, xs[0].shape[-1])
        under_way.append((number, copies.start(xs, arriving), copies.give_back(xs)))
        if len(under_way) == swaps.NUM_SLOTS:
            check()
    while under_way:
        check()
    return found


def test_several_exchanges_may_be_in_flight() -> None:
    assert run_workers(2, exchanged, None) == [[True] * 12] * 2


def test_copies_are_refused_on_a_cpu_and_for_another_method() -> None:
    words = re.escape("copies between GPUs, and this run is on the CPU; use parallel.cp.transport=messages")
    with pytest.raises(Exception, match=words):
        run_workers(2, train_steps, {**SMALL, "parallel.layout": "cp2", **_settings()})
    assert_refused("cp2 parallel.cp.transport=copy_engines", SMALL, "is for parallel.cp.method=ulysses, not ring")


def _settings() -> dict[str, Any]:
    return dict(word.split("=") for word in COPIES.split())
