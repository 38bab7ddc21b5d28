"""The part of a micro batch that a rank computes with."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mplug import Axis, Mesh, contiguous
from mplug.training.batch_parts import own_entries
from mplug.training.feed import Feed
from mplug.training.map_loader import MapLoader
from mplug.training.source import Source

B, S, PIXELS = 2, 24, 5
TOKENS = ("batch", "sequence")
CONTEXT = {
    **dict.fromkeys(("tokens", "labels", "positions"), TOKENS),
    "sample_ids": ("batch",),
    "images": ("batch", "pixels"),
    "mask": (*TOKENS, "sequence"),
}


def batch() -> dict[str, torch.Tensor]:
    sizes = {"batch": B, "sequence": S, "pixels": PIXELS}
    shapes = {name: [sizes[axis] for axis in axes] for name, axes in CONTEXT.items()}
    made = {name: torch.arange(math.prod(shape)).view(shape) for name, shape in shapes.items()}
    return {**made, "positions": torch.arange(S)[None], "unknown to the plan": torch.arange(S)}


def zigzag(length: int, size: int, index: int) -> tuple[range, ...]:
    """One part from the front and its counterpart from the back, so that causal attention costs every rank the same."""
    part = length // (2 * size)
    starts = (index * part, length - (index + 1) * part)
    return tuple(range(start, start + part) for start in starts)


def every_other(length: int, size: int, index: int) -> tuple[range, ...]:
    return (range(index, length, size),)


@pytest.mark.parametrize("cut", [contiguous, zigzag, every_other])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_rank_gets_the_indices_of_its_map_in_every_entry_that_has_the_axis(cut: object, size: int) -> None:
    mesh, whole = Mesh.of([Axis("cp", size, entries={"sequence": cut})], size), batch()
    for rank in range(size):
        mine = [index for part in cut(S, size, rank) for index in part]
        own = own_entries(whole, CONTEXT, mesh, rank)
        for name in ("tokens", "labels", "positions"):
            assert torch.equal(own[name], whole[name][:, mine])
        assert torch.equal(own["mask"], whole["mask"][:, mine][:, :, mine])
        for name in ("sample_ids", "images", "unknown to the plan"):
            assert own[name] is whole[name]


def test_axes_divide_the_sequence_one_after_the_other_and_never_the_samples() -> None:
    near, far = (
        Axis("near", 2, entries={"sequence": every_other}),
        Axis("far", 3, entries={"sequence": zigzag}, distance=1),
    )
    mesh = Mesh.of([near, far], 6)
    for rank in range(6):
        outer = [index for part in zigzag(S, 3, rank // 2) for index in part]
        assert own_entries(batch(), CONTEXT, mesh, rank)["positions"][0].tolist() == outer[rank % 2 :: 2]
    whole = batch()
    own = own_entries(whole, CONTEXT, Mesh.of([Axis("dp", 2, entries={"batch": contiguous})], 2), 1)
    assert all(own[name] is whole[name] for name in whole)


@given(st.lists(st.integers(0, S), max_size=6), st.integers(1, 3))
def test_any_ranges_are_joined_in_their_order(borders: list[int], step: int) -> None:
    ranges = tuple(range(start, stop, step) for start, stop in pairwise([0, *sorted(borders), S]))
    mesh, whole = (
        Mesh.of([Axis("cp", 2, entries={"sequence": lambda *_: ranges})], 2),
        {"positions": batch()["positions"]},
    )
    expected = [index for part in ranges for index in part]
    assert own_entries(whole, CONTEXT, mesh, 0)["positions"][0].tolist() == expected


@given(st.integers(1, 20), st.sampled_from([1, 2, 3, 4]), st.integers(1, 3))
def test_every_rank_evaluates_as_many_micro_batches_and_together_each_sample_once(
    num_samples: int, shards: int, micro_batch_size: int
) -> None:
    mesh, seen, shapes = Mesh.of([Axis("dp", shards, entries={"batch": contiguous})], shards), list[int](), set()
    for rank in range(shards):
        part, count = mesh.batch_shard(rank)
        source = Source("data/acme", "validation", S, count, rank, part=part)
        loader = MapLoader(read, vocab_size=100, shard=(part, count), micro_batch_size=micro_batch_size)
        batches = list(Feed(loader, "cpu", source).take_evenly(num_samples))
        shapes.add(tuple(len(batch["sample_ids"]) for batch in batches))
        for batch in batches:
            counted = (batch["labels"] != -100).all(dim=1)
            assert ((batch["labels"] == -100).all(dim=1) | counted).all()
            seen += batch["sample_ids"][counted].tolist()
    assert len(shapes) == 1
    assert seen == list(range(num_samples))


def read(sample_ids: range) -> dict[str, torch.Tensor]:
    ids = torch.tensor(list(sample_ids))
    rows = ids[:, None].expand(-1, S)
    return {"sample_ids": ids, "tokens": rows, "labels": rows, "positions": torch.arange(S)[None]}
