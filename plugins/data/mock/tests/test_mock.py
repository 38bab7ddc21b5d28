"""Mock: random tokens, each sample a function of the seed and its number."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mplug_mock import Mock

from mplug import MapLoader, Mesh
from mplug.testing import DataSuite

S, V = 16, 50


class TestMock(DataSuite):
    plugin = "mock"
    splits_are_disjoint = False


def run(seed: int = 1) -> Any:
    config = SimpleNamespace(trainer=SimpleNamespace(seq_length=S, seed=seed), model=SimpleNamespace(vocab_size=V))
    return SimpleNamespace(config=config, mesh=Mesh.of([], 1), rank=0, micro_batch_size=2)


def loader(on: Any = None, vocab_size: int | None = None) -> MapLoader:
    return Mock(Mock.Config(vocab_size=vocab_size)).build_loader(on or run())


@pytest.mark.parametrize(("vocab_size", "expected"), [(None, V), (3, 3), (1, 1)])
def test_tokens_are_uniform_below_the_vocabulary(vocab_size: int | None, expected: int) -> None:
    found = loader(vocab_size=vocab_size)
    assert found.vocab_size == expected
    tokens = torch.cat([batch["tokens"].flatten() for batch in found.take(2000)])
    shares = torch.bincount(tokens, minlength=expected).double() / len(tokens)
    assert len(shares) == expected
    spread = (1 / expected * (1 - 1 / expected) / len(tokens)) ** 0.5
    assert float((shares - 1 / expected).abs().max()) <= 5 * spread


def test_no_two_samples_are_alike_of_one_seed_or_two() -> None:
    rows = [row for seed in (1, 2) for batch in loader(run(seed=seed)).take(50) for row in batch["tokens"].tolist()]
    assert len({tuple(row) for row in rows}) == 100


def test_reading_leaves_torchs_own_generator_alone() -> None:
    before = torch.get_rng_state()
    list(loader().take(4))
    assert torch.equal(torch.get_rng_state(), before)
