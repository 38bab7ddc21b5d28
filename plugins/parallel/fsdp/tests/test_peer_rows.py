"""Weights gathered by copies between the memories of ranks, on CPUs, with memory that processes share."""

import re
from typing import Any, cast

import file_memory
import pytest
import torch
from layout_runs import difference_of
from mplug_fsdp import FullyShardedDataParallel, peer_rows, peer_sums, units
from torch import Tensor

from mplug.training.assembly import build
from mplug_testing import run_workers
from mplug_testing.harness import tiny_run, train_steps

BOTH = {"parallel.fsdp.transport": "copy_engines", "parallel.fsdp.sum_transport": "copy_engines"}
COPIES = " ".join(f"{name}={value}" for name, value in BOTH.items())
SMALL: dict[str, Any] = {"model.num_layers": 3, "trainer.micro_batch_size": 1}
UNEVEN = {"model.vocab_size": 257, "data.vocab_size": 257, "model.tie_embeddings": True}


def on_cpus() -> None:
    file_memory.install()
    units.require_copies = lambda *_: None


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("fsdp2", SMALL),
        pytest.param("fsdp4 parallel.fsdp.prefetch=2", {**SMALL, **UNEVEN}, marks=pytest.mark.wide("layouts")),
        pytest.param("dp2fsdp2 parallel.fsdp.reshard_after_forward=false", SMALL, marks=pytest.mark.wide("layouts")),
        pytest.param("fsdp2tp2", {**SMALL, "memory.recompute.mode": "full"}, marks=pytest.mark.wide("layouts")),
        pytest.param("fsdp2 parallel.fsdp.cpu_offload=true", SMALL, marks=pytest.mark.wide("layouts")),
        pytest.param("fsdp2pp2 parallel.pp.schedule=interleaved", SMALL, marks=pytest.mark.wide("layouts")),
    ],
)
def test_copies_give_the_run_of_one_process(layout: str, settings: dict[str, Any]) -> None:
    assert difference_of(f"{layout} {COPIES}", settings, on_cpus) == ""


@pytest.mark.parametrize("own", [0, 2])
def test_a_sum_may_be_in_the_memory_of_a_term_and_adds_in_its_dtype(own: int) -> None:
    terms = [torch.tensor([one, 1.0], dtype=torch.bfloat16) for one in (256.0, 1.0, 1.0, 3.0)]
    terms[own] = terms[own].float()
    peer_sums._add(terms[own], terms)
    assert terms[own].tolist() == [261.0, 4.0], "in bf16, 256 + 1 is 256"


BF16 = {**SMALL, "trainer.precision": "bf16", "parallel.layout": "fsdp2"}


def losses(settings: dict[str, Any]) -> tuple[list[float], list[float]]:
    on_cpus()
    trace = train_steps(settings)
    return trace.losses, trace.norms


@pytest.mark.wide("layouts")
def test_copies_change_no_bit_of_messages() -> None:
    assert run_workers(2, losses, {**BF16, **BOTH}) == run_workers(2, losses, BF16)


def writes(settings: dict[str, Any]) -> tuple[list[int], int, list[bool]]:
    """Be one rank, for a step of two micro batches and the next forward pass: the units written, and all units."""
    on_cpus()
    written, began = list[int](), list[bool]()
    usual, forget = peer_rows.PeerRows._write, peer_rows.PeerRows.forget

    def write(self: peer_rows.PeerRows, unit: int, write: Any) -> None:
        written.append(unit)
        usual(self, unit, write)

    def forgotten(self: peer_rows.PeerRows) -> None:
        began.append(bool(self._written))
        forget(self)

    peer_rows.PeerRows._write, peer_rows.PeerRows.forget = write, forgotten  # type: ignore[method-assign]
    parts = build(tiny_run(settings))
    for _ in range(2):
        parts.stepper.forward_backward(parts.train_loader.take(4), 1)
        parts.stepper.update(1e-3, 0.0)
    return written, len(parts.model.own_units), began


@pytest.mark.wide("layouts")
def test_rows_are_written_once_for_each_version_of_the_weights() -> None:
    for written, number, versions in run_workers(2, writes, {**BF16, "parallel.fsdp.transport": "copy_engines"}):
        assert sorted(written) == sorted([*range(number)] * 2)
        assert versions.count(True) == 2, "each update ends one version"


def late(settings: dict[str, Any]) -> bool:
    """Be one rank; rank 0 forgets to say that it has copied: whether rank 1 waits with its next version."""
    import torch.distributed as dist

    on_cpus()
    file_memory.PATIENCE = 2.0
    memory = file_memory.FileMemory(dist.group.WORLD)  # type: ignore[arg-type]
    for use in range(2):
        if use and dist.get_rank() == 1:
            with pytest.raises(AssertionError, match="rank 0 has not signalled use 1"):
                memory.begin(64, None)
            return True
        memory.begin(64, None)
        own: Tensor = memory.tensor(dist.get_rank(), (4,), torch.float32, 0)
        own.fill_(dist.get_rank() + 1)
        memory.tell(None, 1 - dist.get_rank(), 0)
        memory.hear(None, 1 - dist.get_rank(), 0)
        assert memory.tensor(1 - dist.get_rank(), (4,), torch.float32, 0).tolist() == [2 - dist.get_rank()] * 4
        if dist.get_rank() == 0:
            return True
        memory.end(None)
    return False


@pytest.mark.wide("suites")
def test_the_memory_of_these_tests_notices_a_rank_that_does_not_wait() -> None:
    assert run_workers(2, late, {}) == [True, True]


def test_copies_are_refused_on_a_cpu() -> None:
    words = re.escape("copies between GPUs, and this run is on the CPU; set transport and sum_transport to messages")
    with pytest.raises(Exception, match=words):
        run_workers(2, train_steps, {**BF16, "parallel.fsdp.transport": "copy_engines"})


@pytest.mark.parametrize("field", ["transport", "sum_transport"])
@pytest.mark.parametrize("value", ["copy_engines", "messages"])
def test_a_graph_cannot_replay_copies(field: str, value: str) -> None:
    run = tiny_run({"parallel.layout": "fsdp2", f"parallel.fsdp.{field}": value})
    (plugin,) = (one for one in run.hooks.plugins.values() if isinstance(one, FullyShardedDataParallel))
    answer = plugin.captures(run, cast(Any, None))
    assert (answer is None) == (value == "messages")
