"""Who holds the parts of matrices, and who owns each: arithmetic without processes."""

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import tiny_models
import torch
from layout_runs import under

from mplug import Placement, Run
from mplug.gradients.region import region
from mplug.model.build import build_model
from mplug_matrices.blocks import Shared, blocks_of, owners_of, shared_blocks
from mplug_testing.harness import tiny_run

EXPERTS: dict[str, Any] = {**tiny_models.EXPERTS, "model.vocab_size": 320}
LAYOUTS = ["tp4 model.num_kv_heads=2", "fsdp2tp2", "tp2zero2 parallel.zero.bucket_mib=0.02", "dp4etp2ep2", "fsdp3pp2"]


def placements(layout: str) -> tuple[Run, dict[int, dict[str, Placement]]]:
    """The placements of each rank's trained parameters, as its pieces have them."""
    run = tiny_run(under(layout, {**(EXPERTS if "ep" in layout else {}), "trainer.global_batch_size": 24}))
    found = {}
    for rank in range(run.mesh.world_size):
        run.rank = rank
        model = build_model(run)
        sharded = model.sharding.of if model.sharding else {}
        whole = {name: model.placements[name] for name in model.parameters()}
        found[rank] = {n: model.sharding.placed(p) if n in sharded else p for n, p in whole.items()}  # type: ignore[union-attr]
    return run, found


def shared_of(placement: Placement, rank: int, num_dims: int, items: tuple[str, ...] = ()) -> list[Shared]:
    blocks = blocks_of(placement, rank, num_dims, items)
    return shared_blocks(placement, [one for b in blocks for one in b.matrices()], placement.sharing(num_dims).of(rank))


@pytest.mark.wide("layouts", quick=["1-fsdp3pp2", "2-fsdp2tp2", "1-dp4etp2ep2"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_dims", [1, 2])
def test_what_ranks_send_to_the_owner_of_a_matrix_is_the_matrix(layout: str, num_dims: int) -> None:
    """Each rank holds the numbers of its elements; the parts that an owner receives are those of the matrix."""
    run, found = placements(layout)
    for name in found[0]:
        if len(found[0][name].shape) < num_dims:
            continue
        whole = torch.arange(float(found[0][name].numel)).view(found[0][name].shape) + 1
        local = {}
        for rank, own in found.items():
            if name in own and own[name].holds(rank):
                local[rank] = torch.zeros(own[name].local_shape(rank))
                for box in own[name].boxes(rank):
                    region(local[rank], box).copy_(_at(whole, box.start, box.shape))
        seen = torch.zeros_like(whole)
        for one in shared_of(found[0][name], 0, num_dims, ("heads",)):
            owner = max(one.held)
            received = torch.zeros(one.block.shape)
            for rank, parts in one.sources(owner).items():
                assert rank == owner or parts[0] not in one.held[owner]
                for held in parts:
                    received[held.where] += region(local[rank], held.box)
            assert torch.equal(received, _at(whole, one.block.start, one.block.shape)), one.block
            _at(seen, one.block.start, one.block.shape).add_(1)
            for rank, parts in one.held.items():  # what each rank gets back
                for held in parts:
                    assert torch.equal(received[held.where], region(local[rank], held.box))
        shared_by = set(found[0][name].sharing(num_dims).of(0))
        held_there = torch.zeros_like(whole)
        for rank in shared_by & local.keys():
            for box in found[rank][name].boxes(rank):
                _at(held_there, box.start, box.shape).fill_(1)
        assert torch.equal(seen, held_there), name
    assert run.mesh.world_size > 1


def _at(tensor: torch.Tensor, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]


def test_experts_are_shared_by_the_ranks_that_have_the_same_ones() -> None:
    run, found = placements("dp4etp2ep2")
    name = next(name for name in found[0] if name.endswith("experts.up"))
    ranks = found[0][name].sharing(2).of(0)
    assert len(ranks) == run.mesh.world_size // 2
    assert all(run.mesh.index(rank, "ep") == 0 for rank in ranks)
    assert sum(len(blocks_of(found[0][name], rank, 2)) for rank in (0, *ranks)) > 0


def test_owners_have_about_the_same_work_and_agree() -> None:
    """QKV are three matrices; the work is that of a cubic update. All ranks compute the same owners."""
    _, found = placements("fsdp2tp2 model.num_layers=8")
    answers = []
    for rank, own in found.items():
        shared = [
            one for placement in own.values() if len(placement.shape) == 2 for one in shared_of(placement, rank, 2)
        ]
        owners = owners_of(shared, _work)
        assert all(owner in one.held for owner, one in zip(owners, shared, strict=True))
        answers.append([(one.block, owner) for owner, one in zip(owners, shared, strict=True)])
    assert all(answer == answers[0] for answer in answers)
    loads = Counter[int]()
    for block, owner in answers[0]:
        loads[owner] += int(_work(*block.matrix_shape))
    assert len(loads) == 4
    assert max(loads.values()) <= 1.1 * sum(loads.values()) / 4


def _work(rows: int, columns: int) -> float:
    return rows * columns * min(rows, columns)


def test_owners_that_are_found_by_hand() -> None:
    """The largest first; ranks that hold no part of a matrix cannot own it."""
    _, found = placements("fsdp2tp2")
    one = shared_of(found[0]["blocks.0.attn.qkv.weight"], 0, 2)[0]
    held = one.held[0]

    def matrix(rows: int, *ranks: int) -> Shared:
        block = replace(one.block, shape=(rows, 1))
        return Shared(block, dict.fromkeys(ranks, held))

    four = [matrix(3, 0, 1), matrix(9, 0, 1), matrix(5, 0, 1), matrix(4, 1)]
    assert owners_of(four, lambda rows, columns: rows * columns) == [0, 0, 1, 1]
    assert prod(one.block.shape) == one.block.numel
