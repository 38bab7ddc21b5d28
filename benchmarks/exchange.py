"""Exchanges of experts' rows alone, between the GPUs of one machine: messages, buffers of a fixed size, written memory.

    torchrun --nproc-per-node 2 benchmarks/exchange.py [--rows 16384] [--width 2048] [--experts 8]

Every rank has rows for all experts in equal numbers. `there` is the way to the experts, `and back` the way there and
back. Milliseconds of a call are the median of 20; GB/s count the bytes that leave a GPU. The results are compared with
those of messages, bit by bit.
"""

import argparse
import os
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mplug_ops as ops
from mplug_estimates import timed


def ways(rows: Tensor, counts: Tensor, room: float) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    """The exchanges by name: there, and there and back."""
    from mplug_ep.mailbox import open_mailbox
    from mplug_ep.places import meet
    from mplug_ep.pushed_rows import give_back_pushed, send_pushed

    group: Any = dist.group.WORLD
    size, number = group.size(), len(rows)
    exact = ops.meet(counts, group)
    bounded = ops.meet_bounded(counts, number, int(room * number / size), group)

    def messages() -> Tensor:
        return ops.send(rows, exact, group)

    def buffers() -> Tensor:
        return ops.send_bounded(rows, bounded, group)

    found: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "messages": (messages, lambda: ops.give_back(messages(), exact, number, group)),
        "buffers": (buffers, lambda: ops.give_back_bounded(buffers(), bounded, group)),
        "sizes of messages": (lambda: ops.meet(counts, group).counts, lambda: ops.meet(counts, group).counts),
    }
    try:
        open_mailbox(SimpleNamespace(device="cuda"), group)  # type: ignore[arg-type]
        places = meet(counts, number, int(room * number), group)

        def written() -> Tensor:
            return send_pushed(rows, places, group)

        def sizes() -> Tensor:
            return meet(counts, number, int(room * number), group).counts

        found["written"] = (written, lambda: give_back_pushed(written(), places, group))
        found["sizes of written"] = (sizes, sizes)
    except Exception as error:  # the others are measured
        if not group.rank():
            print(f"written: none: {type(error).__name__}: {error}", flush=True)
    return found


def main() -> None:
    """Measure and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--room", type=float, default=1.5)
    chosen = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator("cuda").manual_seed(rank)
    rows = torch.randn(chosen.rows, chosen.width, device="cuda", generator=generator).bfloat16()
    counts = torch.full((chosen.experts,), chosen.rows // chosen.experts, device="cuda")
    leaving = rows.numel() * rows.element_size() * (size - 1) / size
    expected: dict[bool, Tensor] = {}
    for name, pair in ways(rows, counts, chosen.room).items():
        for back, work in zip((False, True), pair, strict=True):
            try:
                result = work()
                same = (
                    ""
                    if name.startswith("sizes")
                    else torch.equal(result[: chosen.rows], expected.setdefault(back, result))
                )
                timed(work, 5, "cuda")
                seconds = median(timed(work, 20, "cuda"))
            except Exception as error:
                print(f"rank {rank} {name}: none: {type(error).__name__}: {error}", flush=True)
                continue
            if not rank:
                way, rate = ("and back", 2 * leaving) if back else ("there", leaving)
                print(
                    f"{name:20}{way:10}{1e3 * seconds:9.3f} ms{rate / seconds / 1e9:8.0f} GB/s  same bits: {same}",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
