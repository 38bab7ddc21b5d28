"""Cases of attention: its core, and the preparation of queries, keys and values.

B batch, S sequence, H query heads, G KV heads, K head dim.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mplug_nn import Attention, AttentionInputs, AttentionSpec
from mplug_nn.rotary import Rotary
from mplug_nn.specification import ALIBI, RELATIVE
from mplug_nn.static_cache import static_keys
from mplug_nn.turning import prepare_qk
from mplug_testing.kernel_cases.case import Case, Drawn, Suppliers, Tensors
from mplug_testing.kernel_cases.largest_logits import DOCUMENTS_OF_13, GROUPS_OF_13, largest_logits_cases

THREE = Rotary(100.0, division="alternating", sections=(2, 1, 1))
YARN = Rotary(100.0, "yarn", (("factor", 8.0), ("original_max_position_embeddings", 16)))
"""Scaled frequencies, and cosines and sines that are multiplied by a factor."""


def attention_cases() -> Iterator[Case]:
    """Cases of `Attention.core`, `prepare_qk` and `prepare_qkv`, and of `LargestLogits`."""
    yield from _attention_cores()
    yield from _prepared_qk()
    yield from _prepared_qkv()
    yield from largest_logits_cases()


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
    yield from _specified()


def _specified() -> Iterator[Case]:
    """The features of a specification, singly and combined; most cases compute the second half of the model's heads."""
    half = {"first_head": 4}
    yield _core("no causal mask", 2, 13, 4, 2, 8, causal=False, **half)
    yield _core("documents", 2, 13, 4, 2, 8, documents=True, **half)
    yield _core("documents and no causal mask", 2, 13, 4, 2, 8, documents=True, causal=False, **half)
    yield _core("no causal mask and heads of 64", 2, 13, 4, 2, 64, causal=False, **half)
    yield _core("documents and heads of 64", 2, 13, 4, 2, 64, documents=True, **half)
    yield _core("a window", 2, 13, 4, 2, 8, window=4, **half)
    yield _core("a window and no causal mask", 2, 13, 4, 2, 8, window=4, causal=False, **half)
    yield _core("a window in documents", 2, 13, 4, 2, 8, window=3, documents=True, **half)
    yield _core("a window of one position", 2, 13, 4, 2, 8, window=1, **half)
    yield _core("a soft cap", 2, 13, 4, 2, 8, scale=1.0, soft_cap=2.0, **half)
    yield _core("a soft cap and a window", 2, 13, 4, 2, 8, scale=1.0, soft_cap=2.0, window=4, **half)
    yield _core("attention sinks", 2, 13, 4, 2, 8, sinks=True, **half)
    yield _core("attention sinks and a window", 2, 13, 4, 2, 8, sinks=True, window=4, **half)
    yield _core("ALiBi", 2, 13, 4, 2, 8, bias=ALIBI, **half)
    yield _core("ALiBi of six heads", 2, 13, 3, 3, 8, bias=ALIBI, first_head=3)
    yield _core("ALiBi and no causal mask", 2, 13, 4, 2, 8, bias=ALIBI, causal=False, **half)
    yield _core("a relative bias", 2, 13, 4, 2, 8, bias=RELATIVE, **half)
    yield _core(
        "a relative bias, documents and no causal mask", 2, 13, 4, 2, 8, bias=RELATIVE, documents=True, causal=False
    )
    yield _core("values wider than keys", 2, 13, 4, 2, 8, value_width=16, **half)
    yield _core("keys wider than values", 2, 13, 4, 2, 24, value_width=8, **half)
    yield _core("more keys than queries", 2, 5, 4, 2, 8, more_keys=4, **half)
    yield _core("more keys than queries and no causal mask", 2, 5, 4, 2, 8, more_keys=4, causal=False, **half)
    yield _core("one query at the end of the keys", 2, 1, 4, 2, 8, more_keys=12, **half)
    yield _core("more keys than queries, and a window", 2, 3, 4, 2, 8, more_keys=10, window=4, **half)
    yield _core("more keys than queries, and documents", 2, 3, 4, 2, 8, more_keys=10, documents=True, **half)
    yield _core("keys of another sequence, some of them padding", 3, 13, 4, 2, 8, cross_keys=7, **half)
    yield _core("more keys of another sequence than queries", 3, 5, 4, 2, 64, cross_keys=11, **half)
    yield _core("groups of positions", 2, 13, 4, 2, 8, position_groups=True, **half)
    yield _core("groups of positions, a window and documents", 2, 13, 4, 2, 8, **GROUPED, **half)
    yield _core("groups of positions and heads of 64", 2, 13, 4, 2, 64, position_groups=True, window=4, **half)
    yield from _static()


def _static() -> Iterator[Case]:
    """Rows of a static cache: some samples have empty rows, whose values no query sees; other samples have no more."""
    static: dict[str, Any] = {"more_keys": 12, "static_keys": True, "first_head": 4}
    yield _core("static keys", 3, 1, 4, 2, 8, **static)
    yield _core("static keys and heads of 64", 3, 1, 8, 2, 64, **static)
    yield _core("static keys and a window of all rows", 3, 1, 4, 2, 8, window=13, **static)
    yield _core("static keys and a window of some rows", 3, 1, 4, 2, 8, window=4, **static)
    yield _core("static keys and attention sinks", 3, 1, 4, 2, 8, sinks=True, **static)
    yield _core("static keys and a soft cap", 3, 1, 4, 2, 8, scale=1.0, soft_cap=2.0, **static)
    yield _core("static keys and ALiBi", 3, 1, 4, 2, 8, bias=ALIBI, **static)
    yield _core("static keys and a relative bias", 3, 1, 4, 2, 8, bias=RELATIVE, **static)
    yield _core("static keys wider than values", 3, 1, 4, 1, 24, value_width=16, **static)


NEWEST = (4, 12, 30)
"""The positions of three samples in caches of 13 rows: the rows of the last sample have been overwritten."""
GROUPED: dict[str, Any] = {"position_groups": True, "window": 3, "documents": True}
REACH = 3


def _core(
    name: str,
    b: int,
    s: int,
    h: int,
    g: int,
    k: int,
    scale: float | None = None,
    offset: float = 0.0,
    first_head: int = 0,
    value_width: int | None = None,
    more_keys: int = 0,
    cross_keys: int = 0,
    **asked: Any,
) -> Case:
    asked |= {"cross": True, "causal": False} if cross_keys else {}
    spec = AttentionSpec(scale or k**-0.5, k, value_width or k, own_key_length=more_keys > 0, **asked)
    drawn, t = Drawn(s + h + g + k), cross_keys or s + more_keys
    inputs = {
        "q": drawn.normal(b, s, h, k),
        "k": drawn.normal(b, t, g, k),
        "v": drawn.normal(b, t, g, spec.value_width),
    }
    if offset:  # every score is about K times `offset`, with small differences
        inputs |= {"q": 1 + 0.1 * inputs["q"], "k": offset + 0.3 * inputs["k"]}
    if spec.dropout:
        inputs["keys"] = drawn.integers(1 << 60, b)
    if spec.documents:
        inputs["document_lengths"] = torch.tensor(DOCUMENTS_OF_13, device="cpu")
    if spec.position_groups:
        inputs["position_groups"] = torch.tensor(GROUPS_OF_13, device="cpu")
    if spec.cross:
        inputs["key_counts"] = torch.tensor([t, 1, t // 2][:b], device="cpu")
    if spec.static_keys:
        inputs["positions"] = torch.tensor(NEWEST, device="cpu")
    if spec.sinks:
        inputs["sinks"] = drawn.normal(h)
    if spec.bias == RELATIVE:
        inputs["bias_table"] = drawn.normal(h, 2 * REACH + 1)

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        core = suppliers["Attention.core"]
        keys, lengths, sinks, table = map(x.get, ("keys", "document_lengths", "sinks", "bias_table"))
        groups = x.get("position_groups")
        given = AttentionInputs(keys, lengths, sinks, table, first_head, h + first_head, position_groups=groups)
        given = given._replace(key_counts=x.get("key_counts"))
        if not spec.static_keys:
            return lambda: {"output": core(x["q"], x["k"], x["v"], spec, given)}
        given = given._replace(static=static_keys(x["positions"], t))

        @torch.no_grad()
        def sampled() -> dict[str, Tensor]:
            return {"output": core(x["q"], x["k"], x["v"], spec, given)}

        return sampled

    module = Attention(h * k, h, g, k, bias=False, qk_norm=False, theta=None)
    module.spec = spec
    return Case(("Attention.core",), name, module, inputs, bind, spec.needs)


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
    yield _qk("scaled frequencies", 2, 16, 4, 2, theta=YARN)
    yield _qk("rotary positions of a part of the head", 2, 16, 4, 2, theta=Rotary(100.0, width=4))
    yield _qk("rotary positions of neighbouring coordinates", 2, 16, 4, 2, theta=Rotary(100.0, interleaved=True))
    yield _qk("positions of three coordinates", 2, 16, 4, 2, theta=THREE)
    yield _qk("positions of three coordinates of each sample", 2, 9, 4, 2, theta=THREE, norm=True, each=True)


def _qk(
    name: str,
    b: int,
    s: int,
    h: int,
    g: int,
    theta: float | Rotary | None = None,
    norm: bool = False,
    eps: float = 1e-5,
    each: bool = False,
    first: int = 0,
) -> Case:
    k, drawn = 8, Drawn(s + h + g)
    module = Attention(h * k, h, g, k, bias=False, qk_norm=norm, theta=theta, eps=eps)
    inputs = {"q": drawn.normal(b, s, h, k), "k": drawn.normal(b, s, g, k)}
    inputs |= _how_prepared(drawn, b, s, k, norm, each, first, theta)

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        prepare, weights = suppliers["Attention.prepare_qk"], (x.get("q_weight"), x.get("k_weight"))

        def call() -> dict[str, Tensor]:
            q, k = prepare(x["q"], x["k"], x["positions"], *weights, eps, module.theta)
            return {"prepared q": q, "prepared k": k}

        return call

    return Case(("Attention.prepare_qk",), name, module, inputs, bind, module.needs("Attention.prepare_qk", ()))


def _how_prepared(
    drawn: Drawn, b: int, s: int, k: int, norm: bool, each: bool, first: int, theta: float | Rotary | None
) -> dict[str, Tensor]:
    """Positions [1, S] (`each`: [B, S]), with three coordinates [..., 3] if need be; the weights [K] of QK-norm."""
    positions = torch.arange(first, first + s, device="cpu")[None]
    positions = positions + 7 * torch.arange(b, device="cpu")[:, None] if each else positions
    if isinstance(theta, Rotary) and theta.division:
        positions = torch.stack((positions, positions // 3 + 5, 2 * positions), dim=-1)
    inputs = {"positions": positions}
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
    yield _qkv("scaled frequencies", 2, 6, 4, 2, 8, theta=YARN)
    yield _qkv("QK-norm, then scaled frequencies", 2, 6, 4, 2, 8, theta=YARN, norm=True)
    yield _qkv("rotary positions of a part of the head", 2, 6, 4, 2, 8, theta=Rotary(100.0, width=4))
    yield _qkv("positions of three coordinates", 2, 6, 4, 2, 8, theta=THREE)
    yield _qkv("positions of three coordinates of each sample", 2, 6, 4, 2, 8, theta=THREE, norm=True, each=True)
    yield _qkv("heads of 64", 2, 5, 3, 3, 64, theta=10000.0, norm=True)
    yield _qkv("heads of 24", 2, 5, 4, 2, 24, theta=10000.0, norm=True)


def _qkv(
    name: str,
    b: int,
    s: int,
    h: int,
    g: int,
    k: int,
    theta: float | Rotary | None = None,
    norm: bool = False,
    eps: float = 1e-5,
    each: bool = False,
    first: int = 0,
) -> Case:
    drawn = Drawn(s + h + g + k)
    module = Attention(h * k, h, g, k, bias=False, qk_norm=norm, theta=theta, eps=eps)
    inputs = {
        "packed heads": drawn.normal(b, s, h + 2 * g, k),
        **_how_prepared(drawn, b, s, k, norm, each, first, theta),
    }

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        prepare, weights = suppliers["Attention.prepare_qkv"], (x.get("q_weight"), x.get("k_weight"))

        def call() -> dict[str, Tensor]:
            q, k, v = prepare(x["packed heads"], h, g, x["positions"], *weights, eps, module.theta, prepare_qk)
            return {"prepared q": q, "prepared k": k, "v": v}

        return call

    return Case(("Attention.prepare_qkv",), name, module, inputs, bind, module.needs("Attention.prepare_qkv", ()))
