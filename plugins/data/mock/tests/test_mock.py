"""Mock: random tokens, each sample a function of the seed and its number."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mplug_mock import Mock

from mplug import Axis, MapLoader, Mesh, MicroBatch, contiguous

S, V = 16, 50


def run(data_size: int = 1, rank: int = 0, micro_batch_size: int = 2, seed: int = 1) -> Any:
    trainer = SimpleNamespace(seq_length=S, seed=seed)
    mesh = Mesh.of([Axis("acme", data_size, entries={"batch": contiguous})], data_size)
    config = SimpleNamespace(trainer=trainer, model=SimpleNamespace(vocab_size=V))
    return SimpleNamespace(config=config, mesh=mesh, rank=rank, device="cpu", micro_batch_size=micro_batch_size)


def loader(on: Any = None, vocab_size: int | None = None) -> MapLoader:
    return Mock(Mock.Config(vocab_size=vocab_size)).build_loader(on or run())


def samples(batches: list[MicroBatch]) -> dict[int, list[int]]:
    """Sample id -> its tokens and its last label."""
    return {
        int(number): [*tokens.tolist(), int(labels[-1])]
        for batch in batches
        for number, tokens, labels in zip(batch["sample_ids"], batch["tokens"], batch["labels"], strict=True)
    }


def test_a_micro_batch_has_the_entries_of_the_contract() -> None:
    first, second = list(loader().take(3))
    shapes = {name: tuple(tensor.shape) for name, tensor in first.items()}
    assert shapes == {"tokens": (2, S), "labels": (2, S), "positions": (1, S), "sample_ids": (2,)}
    assert all(tensor.dtype is torch.int64 for tensor in first.values())
    assert first["positions"].tolist() == [list(range(S))]
    assert (first["sample_ids"].tolist(), second["sample_ids"].tolist()) == ([0, 1], [2])


def test_labels_are_the_tokens_shifted_by_one() -> None:
    for batch in loader().take(8):
        assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])


@pytest.mark.parametrize(("vocab_size", "expected"), [(None, V), (3, 3), (1, 1)])
def test_tokens_are_uniform_below_the_vocabulary(vocab_size: int | None, expected: int) -> None:
    found = loader(vocab_size=vocab_size)
    assert found.vocab_size == expected
    tokens = torch.cat([batch["tokens"].flatten() for batch in found.take(2000)])
    shares = torch.bincount(tokens, minlength=expected).double() / len(tokens)
    assert len(shares) == expected
    spread = (1 / expected * (1 - 1 / expected) / len(tokens)) ** 0.5
    assert float((shares - 1 / expected).abs().max()) <= 5 * spread


@pytest.mark.parametrize("data_size", [2, 3])
def test_the_ranks_together_read_what_one_rank_reads_without_overlap(data_size: int) -> None:
    alone = loader()
    ranks = [loader(run(data_size, rank, micro_batch_size=3)) for rank in range(data_size)]
    for batch in (12, 6):
        parts = [samples(list(rank.take(batch))) for rank in ranks]
        together = {number: row for part in parts for number, row in part.items()}
        assert sum(map(len, parts)) == batch
        assert together == samples(list(alone.take(batch)))


def test_a_loader_resumes_exactly() -> None:
    first, resumed = loader(), loader()
    list(first.take(7))
    resumed.load_state_dict(first.state_dict())
    assert samples(list(resumed.take(5))) == samples(list(first.take(5)))


def test_samples_and_seeds_are_unlike_each_other_whatever_torch_has_drawn_before() -> None:
    one = samples(list(loader().take(50)))
    torch.manual_seed(5)
    torch.rand(3)
    assert samples(list(loader().take(50))) == one
    assert len({tuple(row) for row in one.values()}) == 50
    other = samples(list(loader(run(seed=2)).take(50)))
    assert not {tuple(row) for row in one.values()} & {tuple(row) for row in other.values()}


def test_reading_leaves_torchs_own_generator_alone() -> None:
    before = torch.get_rng_state()
    list(loader().take(4))
    assert torch.equal(torch.get_rng_state(), before)
