"""Mock: random tokens, each sample a function of the seed and its number."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mplug_mock import Mock

from mplug import MapLoader, Mesh
from mplug_testing import DataSuite
from mplug_testing.harness import tiny_run

S, V = 16, 50


MEDIA = dict.fromkeys(
    ("media", "media_sides", "media_frames"), "the model has no streams; qwen-vl's test_layouts.py trains with media"
)


class TestMock(DataSuite):
    plugin = "mock"
    splits_are_disjoint = False
    without_effect = MEDIA
    beside = {"pairs": {"data.documents": 2}, "rollouts": {"data.documents": 2}}


class TestMockOfPackedSamples(TestMock):
    settings = {"data.documents": 3}


def run(seed: int = 1) -> Any:
    trainer, parallel = SimpleNamespace(seq_length=S, seed=seed), SimpleNamespace(balance=False)
    config = SimpleNamespace(trainer=trainer, model=SimpleNamespace(vocab_size=V), parallel=parallel)
    return SimpleNamespace(config=config, mesh=Mesh.of([], 1), rank=0, micro_batch_size=2)


def loader(on: Any = None, vocab_size: int | None = None, documents: int = 1) -> MapLoader:
    return Mock(Mock.Config(vocab_size=vocab_size, documents=documents)).build_loader(on or run())


def require_uniform(values: torch.Tensor, number: int) -> None:
    """Fail unless the values 0 to `number` - 1 are equally frequent, within five standard deviations."""
    shares = torch.bincount(values, minlength=number).double() / len(values)
    assert len(shares) == number
    assert float((shares - 1 / number).abs().max()) <= 5 * (1 / number * (1 - 1 / number) / len(values)) ** 0.5


@pytest.mark.parametrize(("vocab_size", "expected"), [(None, V), (3, 3), (1, 1)])
def test_tokens_are_uniform_below_the_vocabulary(vocab_size: int | None, expected: int) -> None:
    found = loader(vocab_size=vocab_size)
    assert found.vocab_size == expected
    require_uniform(torch.cat([batch["tokens"].flatten() for batch in found.take(2000)]), expected)


def test_all_samples_differ_within_a_seed_and_between_seeds() -> None:
    rows = [row for seed in (1, 2) for batch in loader(run(seed=seed)).take(50) for row in batch["tokens"].tolist()]
    assert len({tuple(row) for row in rows}) == 100


def test_reading_does_not_use_torchs_generator() -> None:
    before = torch.get_rng_state()
    list(loader().take(4))
    assert torch.equal(torch.get_rng_state(), before)


# Packed samples.


@pytest.mark.parametrize("documents", [2, 5, S])
def test_documents_have_positions_and_targets_of_their_own(documents: int) -> None:
    plain = list(loader().take(40))
    for batch, alone in zip(loader(documents=documents).take(40), plain, strict=True):
        assert torch.equal(batch["tokens"], alone["tokens"])
        assert batch["document_lengths"].shape == (2, documents)
        for row, lengths in enumerate(batch["document_lengths"].tolist()):
            assert sum(lengths) == S
            assert min(lengths) >= 1
            labels = alone["labels"][row].clone()
            for end in torch.tensor(lengths).cumsum(0):
                labels[end - 1] = -100
            assert torch.equal(batch["labels"][row], labels)
            assert batch["positions"][row].tolist() == [p for length in lengths for p in range(length)]


def test_all_ways_to_cut_a_sample_are_equally_frequent() -> None:
    lengths = torch.cat([batch["document_lengths"] for batch in loader(documents=2).take(3000)])
    require_uniform(lengths[:, 0] - 1, S - 1)


def test_batch_entries_announces_packed_samples() -> None:
    assert tiny_run({"data.documents": 3}).entries == {"document_lengths"}
    assert tiny_run({}).entries == frozenset()
