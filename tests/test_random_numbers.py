"""Random numbers by keys and positions, and dropout with them."""

import math
from statistics import NormalDist

import pytest
import torch
from block_sizes import KEYS, POSITIONS, D, S
from plain_attention import attend
from random_values import drawn
from torch import Tensor

from mplug.tensors.random import key_of, mix, normal, sample_keys, uniform
from mplug_nn import Dropout

# Keyed random numbers.

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


def splitmix64(seed: int, number: int) -> int:
    """The generator of Steele, Lea and Flood (OOPSLA 2014), in Python's integers."""
    z = (seed + number * GOLDEN) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_mix_is_splitmix64_of_the_paper_and_uniform_numbers_are_its_upper_24_bits(key: int) -> None:
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # its first outputs from seed 0
    assert [splitmix64(0, number) for number in (1, 2, 3)] == published
    states = torch.tensor([signed(number * GOLDEN & MASK) for number in (1, 2, 3)])
    assert mix(states).tolist() == [signed(bits) for bits in published]
    counters = torch.tensor([0, 1, 2, 1000, 2**62, -5])
    expected = [(splitmix64(key, number) >> 40) / 2**24 for number in counters.tolist()]
    found = uniform(key, counters)
    assert found.dtype is torch.float32
    assert found.tolist() == expected


@pytest.mark.parametrize("key", [0, key_of(1234, "parameter", "blocks.0.mlp.up.weight")])
def test_normal_numbers_are_the_quantiles_of_52_bits(key: int) -> None:
    counters = torch.arange(2000)
    quantile = NormalDist().inv_cdf
    expected = [quantile(((splitmix64(key, number) >> 12) + 0.5) / 2**52) for number in counters.tolist()]
    found = normal(key, counters)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("upper", [0, 1, 2, 2**51 - 1, 2**51, 2**52 - 3, 2**52 - 2, 2**52 - 1])
def test_normal_numbers_are_finite_at_both_ends_and_centred(upper: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = torch.tensor([signed(upper << 12), signed((2**52 - 1 - upper) << 12)])
    monkeypatch.setattr("mplug.tensors.random.mix", lambda _: bits)
    low, high = normal(5, torch.zeros(2, dtype=torch.int64)).tolist()
    assert abs(low) < 8.5
    assert low == pytest.approx(-high, rel=0.02, abs=1e-15)


def test_keys_tell_words_and_samples_apart_and_depend_on_nothing_else() -> None:
    words = [(1, "a"), (1, "b"), (2, "a"), ("a", 1), ("ab", "c"), ("a", "bc"), ()]
    keys = [key_of(*one) for one in words]
    assert len(set(keys)) == len(keys)
    assert key_of(1234, "step", 7) == key_of(1234, "step", 7)
    assert all(-(2**63) <= key < 2**63 for key in keys)
    ids = torch.arange(1000)
    keys = sample_keys(1, 2, ids)
    assert torch.equal(keys[ids.flip(0)], sample_keys(1, 2, ids.flip(0)))
    assert torch.equal(keys[5:9], sample_keys(1, 2, ids[5:9]))
    together = torch.cat((keys, sample_keys(1, 3, ids), sample_keys(2, 2, ids)))
    assert len(together.unique()) == 3000


def dropout(probability: float) -> Dropout:
    layer = Dropout(probability)
    layer.site.fill_(7)
    return layer.train()


MANY = torch.arange(20) * 977 - 5000


def test_dropout_keeps_the_expected_share_and_scales_it_up() -> None:
    y = dropout(0.25)(torch.ones(20, 64, 128), MANY, torch.arange(64)[None])
    n = y.numel()
    assert y.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert float((y > 0).double().mean()) == pytest.approx(0.75, abs=5 * math.sqrt(0.1875 / n))
    for dims in ((0, 1), (0, 2), (1, 2)):  # no feature, position or sample is treated apart
        share = (y > 0).double().mean(dims)
        assert float((share - 0.75).abs().max()) < 6 * math.sqrt(0.1875 / (n / len(share)))


def test_a_mask_depends_on_sample_and_position_alone_and_gradients_pass_where_values_did() -> None:
    layer, positions, x = dropout(0.5), torch.arange(8)[None], torch.ones(20, 8, 16)
    whole, zigzag = layer(x, MANY, positions), torch.tensor([[6, 7, 0, 1]])
    assert torch.equal(layer(x[:, :4], MANY, zigzag), whole[:, zigzag[0]])
    assert torch.equal(layer(x, MANY, positions.expand(20, 8)), whole)
    layer, x = dropout(0.5), drawn(2, S, D).requires_grad_()
    y = layer(x, KEYS, POSITIONS)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (y != 0).double() * 2)


def test_attention_dropout_does_not_depend_on_the_batch_or_on_what_follows() -> None:
    q, k, v = (drawn(6, S, 2, 4, seed=seed) for seed in range(3))
    keys = torch.arange(6) * 31

    def part(rows: slice, length: int) -> Tensor:
        cut = [x[rows, :length] for x in (q, k, v)]
        return attend(*cut, scale=0.5, dropout=0.5, keys=keys[rows])

    whole = part(slice(None), S)
    torch.testing.assert_close(part(slice(2, 4), S), whole[2:4])
    torch.testing.assert_close(part(slice(None), 3), whole[:, :3])


def test_attention_dropout_drops_weights_and_is_right_on_average() -> None:
    n, p = 4000, 0.3
    q, k = torch.zeros(n, 2, 2, 4), torch.zeros(n, 2, 2, 4)
    v = torch.eye(2, 4)[None, :, None].expand(n, 2, 2, 4)  # a weight is a coordinate of the result
    weights = attend(q, k, v, scale=1.0, dropout=p, keys=mix(torch.arange(n)))
    last = weights[:, 1, :, :2].double()
    assert last.unique().tolist() == pytest.approx([0.0, 0.5 / 0.7])
    assert float((last > 0).double().mean()) == pytest.approx(1 - p, abs=5 * math.sqrt(p * (1 - p) / last.numel()))
    heads = ((last[:, 0] > 0).double() - 0.7) * ((last[:, 1] > 0).double() - 0.7)
    assert abs(float(heads.mean()) / 0.21) < 5 / math.sqrt(heads.numel())
