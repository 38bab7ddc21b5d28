"""Counter-based random numbers: they depend on what they are drawn for, never on the order of the draws.

A number is a hash of a key and a counter (splitmix64's finalizer; Steele, Lea and Flood, OOPSLA 2014). So initial
weights and dropout masks are the same under any layout, and checkpoints save no generator state.
"""

import math
from hashlib import blake2b

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX2 = 0x94D049BB133111EB - 2**64


def key_of(*words: str | int) -> int:
    """A 64-bit key (signed) from words, such as a seed and a parameter's name."""
    text = "\0".join(map(str, words)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True)


def mix(bits: Tensor) -> Tensor:
    """Hash each int64: every input bit changes each output bit with probability one half."""
    bits = (bits ^ _shift(bits, 30)) * _MIX1
    bits = (bits ^ _shift(bits, 27)) * _MIX2
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, by: int) -> Tensor:
    return (bits >> by) & ((1 << (64 - by)) - 1)  # int64 shifts are arithmetic


def uniform(key: Tensor | int, counter: Tensor) -> Tensor:
    """fp32 numbers in [0, 1) with 24 random bits each; key and int64 counters broadcast."""
    return _shift(mix(key + counter * _GOLDEN), 40).to(torch.float32) * 2.0**-24


def normal(key: int, counter: Tensor) -> Tensor:
    """fp64 standard normal numbers for a key and int64 counters: the inverse distribution function of 52 random bits.

    With 53 bits, the largest number would round to infinity.
    """
    bits = _shift(mix(key + counter * _GOLDEN), 12)
    return torch.erfinv((bits.to(torch.float64) + 0.5) * 2.0**-51 - 1) * math.sqrt(2)


def step_key(seed: int, step: int) -> int:
    """The key of a step, from which the keys of its samples follow."""
    return key_of(seed, "step", step)


def keys_of_samples(key: Tensor | int, sample_ids: Tensor) -> Tensor:
    """The random keys [B] of samples in the step with this key."""
    return mix(sample_ids.to(torch.int64) * _GOLDEN + key)


def sample_keys(seed: int, step: int, sample_ids: Tensor) -> Tensor:
    """The random keys [B] of a micro batch's samples in one step."""
    return keys_of_samples(step_key(seed, step), sample_ids)
