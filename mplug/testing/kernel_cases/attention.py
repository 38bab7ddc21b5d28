"""Attention: its core, and queries, keys and values before it.

B batch, S sequence, H query heads, G KV heads, K head dim.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mplug.nn import Attention
from mplug.nn.attention import prepare_qk
from mplug.testing.kernel_cases.case import Case, Drawn, Suppliers, Tensors


def attention_cases() -> Iterator[Case]:
    """Of `Attention.core`, `prepare_qk` and `prepare_qkv`."""
    yield from _attention_cores()
    yield from _prepared_qk()
    yield from _prepared_qkv()


def _attention_cores() -> Iterator[Case]:
    yield _core("as many KV heads as query heads", 2, 16, 4, 4, 8)
    yield _core("a scale that is not 1/sqrt(head dim)", 2, 16, 4, 4, 8, scale=0.9)
    yield _core("grouped KV heads", 2, 16, 6, 2, 8)
    yield _core("one KV head", 2, 16, 4, 1, 8)
    yield _core("an odd length", 2, 33, 2, 2, 8)
    yield _core("a length of several blocks", 1, 131, 2, 1, 8)
    yield _core("batch 1 and length 1", 1, 1, 2, 2, 8)
    yield _core("heads of 64", 1, 20, 2, 2, 64)
    yield _core("heads of 24", 1, 20, 2, 2, 24)
    yield _core("scores whose exponentials overflow", 2, 16, 2, 2, 8, scale=1.0, offset=16.0)
    yield _core("scores whose exponentials vanish", 2, 16, 2, 2, 8, scale=1.0, offset=-16.0)
    yield _core("first_head and no dropout", 2, 16, 4, 4, 8, first_head=4)
    yield _core("dropout by the samples' keys", 2, 16, 4, 2, 8, dropout=0.25)
    yield _core("dropout with heads numbered from first_head", 2, 16, 4, 2, 8, dropout=0.25, first_head=4)


def _core(
    name: str,
    b: int,
    s: int,
    h: int,
    g: int,
    k: int,
    scale: float | None = None,
    dropout: float = 0.0,
    offset: float = 0.0,
    **named: Any,
) -> Case:
    drawn = Drawn(s + h + g + k)
    inputs = {"q": drawn.normal(b, s, h, k), "k": drawn.normal(b, s, g, k), "v": drawn.normal(b, s, g, k)}
    if offset:  # every score is about `offset` K, and their differences are small
        inputs |= {"q": 1 + 0.1 * inputs["q"], "k": offset + 0.3 * inputs["k"]}
    if dropout:
        inputs["keys"] = drawn.integers(1 << 60, b)
    named |= {"scale": k**-0.5 if scale is None else scale, "dropout": dropout}

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        core = suppliers["Attention.core"]
        return lambda: {"output": core(x["q"], x["k"], x["v"], keys=x.get("keys"), **named)}

    module = Attention(h * k, h, g, k, bias=False, qk_norm=False, theta=None, dropout=dropout)
    return Case(("Attention.core",), name, module, inputs, bind)


def _prepared_qk() -> Iterator[Case]:
    yield _qk("rotary positions", 2, 16, 4, 4, theta=10000.0)
    yield _qk("QK-norm", 2, 16, 4, 4, norm=True)
    yield _qk("QK-norm, then rotary positions", 2, 16, 4, 4, theta=10000.0, norm=True)
    yield _qk("grouped KV heads", 2, 16, 6, 2, theta=10000.0, norm=True)
    yield _qk("an eps that counts", 2, 16, 4, 4, norm=True, eps=1.0)
    yield _qk("another base of the frequencies", 2, 16, 4, 4, theta=500.0)
    yield _qk("positions of each sample", 2, 33, 4, 2, theta=10000.0, each=True)
    yield _qk("far positions", 1, 16, 4, 2, theta=10000.0, first=4000)
    yield _qk("neither norm nor positions", 2, 16, 4, 4)
    yield _qk("batch 1 and length 1", 1, 1, 2, 2, theta=10000.0, norm=True, first=3)


def _qk(
    name: str,
    b: int,
    s: int,
    h: int,
    g: int,
    theta: float | None = None,
    norm: bool = False,
    eps: float = 1e-5,
    each: bool = False,
    first: int = 0,
) -> Case:
    k, drawn = 8, Drawn(s + h + g)
    inputs = {"q": drawn.normal(b, s, h, k), "k": drawn.normal(b, s, g, k)}
    inputs |= _how_prepared(drawn, b, s, k, norm, each, first)

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        prepare, weights = suppliers["Attention.prepare_qk"], (x.get("q_weight"), x.get("k_weight"))

        def call() -> dict[str, Tensor]:
            q, k = prepare(x["q"], x["k"], x["positions"], *weights, eps, theta)
            return {"prepared q": q, "prepared k": k}

        return call

    module = Attention(h * k, h, g, k, bias=False, qk_norm=norm, theta=theta, eps=eps)
    return Case(("Attention.prepare_qk",), name, module, inputs, bind)


def _how_prepared(drawn: Drawn, b: int, s: int, k: int, norm: bool, each: bool, first: int) -> dict[str, Tensor]:
    """Positions [1, S] (`each`: [B, S]), and the weights [K] of QK-norm."""
    positions = torch.arange(first, first + s, device="cpu")[None]
    inputs = {"positions": positions + 7 * torch.arange(b, device="cpu")[:, None] if each else positions}
    if norm:
        inputs |= {"q_weight": 1 + 0.2 * drawn.normal(k), "k_weight": 1 + 0.2 * drawn.normal(k)}
    return inputs


def _prepared_qkv() -> Iterator[Case]:
    yield _qkv("rotary positions", 2, 6, 4, 4, 8, theta=10000.0)
    yield _qkv("QK-norm", 2, 6, 4, 4, 8, norm=True)
    yield _qkv("QK-norm, then rotary positions", 2, 6, 4, 4, 8, theta=10000.0, norm=True)
    yield _qkv("neither norm nor positions", 2, 6, 4, 4, 8)
    yield _qkv("grouped KV heads", 2, 6, 6, 2, 8, theta=10000.0)
    yield _qkv("grouped KV heads and QK-norm", 2, 6, 6, 2, 8, theta=10000.0, norm=True)
    yield _qkv("one KV head", 2, 6, 4, 1, 8, theta=10000.0, norm=True)
    yield _qkv("an eps that counts", 2, 6, 4, 4, 8, norm=True, eps=1.0)
    yield _qkv("another base of the frequencies", 2, 6, 4, 4, 8, theta=500.0)
    yield _qkv("positions of each sample", 2, 7, 4, 2, 8, theta=10000.0, each=True)
    yield _qkv("far positions", 1, 6, 4, 2, 8, theta=10000.0, first=4000)
    yield _qkv("batch 1 and length 1", 1, 1, 2, 2, 8, theta=10000.0, norm=True, first=3)
    yield _qkv("heads of 64", 2, 5, 3, 3, 64, theta=10000.0, norm=True)
    yield _qkv("heads of 24", 2, 5, 4, 2, 24, theta=10000.0, norm=True)


def _qkv(
    name: str,
    b: int,
    s: int,
    h: int,
    g: int,
    k: int,
    theta: float | None = None,
    norm: bool = False,
    eps: float = 1e-5,
    each: bool = False,
    first: int = 0,
) -> Case:
    drawn = Drawn(s + h + g + k)
    inputs = {"packed heads": drawn.normal(b, s, h + 2 * g, k), **_how_prepared(drawn, b, s, k, norm, each, first)}

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        prepare, weights = suppliers["Attention.prepare_qkv"], (x.get("q_weight"), x.get("k_weight"))

        def call() -> dict[str, Tensor]:
            q, k, v = prepare(x["packed heads"], h, g, x["positions"], *weights, eps, theta, prepare_qk)
            return {"prepared q": q, "prepared k": k, "v": v}

        return call

    module = Attention(h * k, h, g, k, bias=False, qk_norm=norm, theta=theta, eps=eps)
    return Case(("Attention.prepare_qkv",), name, module, inputs, bind)
