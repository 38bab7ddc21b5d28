"""GPT keeps the contract of models, and its loss and gradients are those of the papers' formulas."""

import math
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mplug_gpt import GPT
from torch import Tensor

from mplug import Mesh, Model, UsageError
from mplug.model.memory import allocate, initialize
from mplug.tensors.random import sample_keys
from mplug_testing import ModelSuite

B, S, V = 2, 6, 13
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": V,
    "max_position_embeddings": 9,
}
CHOICES: dict[str, list[dict[str, Any]]] = {
    "position": [{"position": "learned"}, {"position": "rotary", "rope_theta": 100.0}],
    "heads": [{}, {"num_kv_heads": 2, "head_dim": 6}, {"num_kv_heads": 1}],
    "qk_norm": [{"qk_norm": False}, {"qk_norm": True}],
    "activation": [{"activation": name, "ffn_hidden_size": 20} for name in ("gelu", "gelu_tanh", "swiglu")],
    "norm": [{"norm": "layernorm", "norm_eps": 1e-3}, {"norm": "rmsnorm"}],
    "tied": [{"tie_embeddings": False}, {"tie_embeddings": True}],
    "bias": [{"bias": False}, {"bias": True}],
}
SHAPES = [
    {**SMALL, **{field: value for choice in combination for field, value in choice.items()}}
    for combination in product(*CHOICES.values())
]
SHAPES += [{**SMALL, **heads, "position": "alibi"} for heads in CHOICES["heads"]]


def pairs_of(shape: dict[str, Any]) -> set[tuple[str, ...]]:
    """Every two fields of a shape with their values."""
    return set(combinations(sorted(f"{field}={value}" for field, value in shape.items() if field not in SMALL), 2))


def with_every_pair(shapes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Few of the shapes: every two choices that any shape has together are together in one of these."""
    chosen, missing = list[dict[str, Any]](), set().union(*map(pairs_of, shapes))
    while missing:
        chosen.append(max(shapes, key=lambda shape: len(pairs_of(shape) & missing)))
        missing -= pairs_of(chosen[-1])
    return chosen


QUICK = with_every_pair(SHAPES)
"""The shapes of the quick tests; `pytest --wide layouts` tries the whole product."""


def on_meta(shape: dict[str, Any]) -> Model:
    with torch.device("meta"):
        return GPT(GPT.Config(**shape)).build_model()


def built(shape: dict[str, Any], seed: int = 1) -> Model:
    """The model with memory and initial values, on one process."""
    model = on_meta(shape)
    model.place(Mesh.of([], 1), None)
    model.keep_stage(0)
    allocate(model, 0, torch.device("cpu"), torch.float32, seed)
    initialize(model.parameters(), model.placements, 0, seed)
    return model


def shaken(shape: dict[str, Any]) -> Model:
    """The model in fp64 with values under which every parameter matters, biases and norms too."""
    model, generator = built(shape), torch.Generator().manual_seed(5)
    model.module.double()
    with torch.no_grad():
        for parameter in model.parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def batch(seed: int = 0, samples: int = B) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(V, (samples, S + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, 2] = -100
    ids = torch.arange(samples)
    return {
        "tokens": tokens[:, :-1],
        "labels": labels,
        "positions": torch.arange(S)[None],
        "sample_ids": ids,
        "keys": sample_keys(1, 1, ids),
    }


# The contract.


DENSE = ("cp2", "dp2", "fsdp2", "pp2", "tp2", "zero2")
"""Strategies that do not divide experts; `fsdp` refuses to run beside `zero`."""


PAIRS = [f"{one}{other}" for one, other in combinations(DENSE, 2) if (one, other) != ("fsdp2", "zero2")]


class TestGPT(ModelSuite):
    """Under every second pair that does not divide experts; the wide set has all of them."""

    plugin = "gpt"
    settings = {"model.dropout": 0.1}
    layouts = ("", *PAIRS[::2])
    positions = "relative"
    beside = {"max_position_embeddings": {"model.position": "learned"}}

    def reference(self, weights: Any, batch: Any, config: Any) -> Tensor:
        return decode(weights, config, batch["tokens"], batch["positions"])


class TestGPTWithEverything(TestGPT):
    checks_fields = False
    positions = "absolute"
    settings = {
        "model.position": "learned",
        "model.max_position_embeddings": 16,
        "model.bias": True,
        "model.activation": "swiglu",
        "model.ffn_hidden_size": 64,
        "model.norm": "rmsnorm",
        "model.tie_embeddings": True,
    }
    layouts = ("pp2tp2", "tp2 parallel.tp.sequence_parallel=false")


# An independent implementation, from the papers.

Weights = dict[str, Tensor]


def norm(x: Tensor, w: Weights, name: str, c: Any) -> Tensor:
    """Layer normalization (arXiv 1607.06450) or RMSNorm (arXiv 1910.07467)."""
    if c.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + c.norm_eps) * w[f"{name}.weight"]
    return x + w.get(f"{name}.bias", 0)


def affine(x: Tensor, w: Weights, name: str) -> Tensor:
    return torch.einsum("bsi,oi->bso", x, w[f"{name}.weight"]) + w.get(f"{name}.bias", 0)


def turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions (arXiv 2104.09864): coordinates i and i + K/2 are a plane, turned by position theta^(-2i/K)."""
    half = x.shape[-1] // 2
    angles = positions[0, :, None].double() * torch.tensor(
        [theta ** (-i / half) for i in range(half)], dtype=torch.float64
    )
    cos, sin = torch.cos(angles)[None, :, None], torch.sin(angles)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attention(x: Tensor, w: Weights, name: str, c: Any, positions: Tensor) -> Tensor:
    """Causal attention with grouped heads (arXiv 1706.03762, 2305.13245) and QK-norm (arXiv 2010.04245)."""
    heads, groups, length = c.num_attention_heads, c.num_kv_heads or c.num_attention_heads, x.shape[1]
    rows = affine(x, w, f"{name}.qkv").unflatten(-1, (heads + 2 * groups, -1))
    width = rows.shape[-1]
    q, k, v = rows[:, :, :heads], rows[:, :, heads : heads + groups], rows[:, :, heads + groups :]
    if c.qk_norm:
        q, k = (
            t / torch.sqrt((t * t).mean(-1, keepdim=True) + c.norm_eps) * w[f"{name}.{which}_norm"]
            for t, which in ((q, "q"), (k, "k"))
        )
    if c.position == "rotary":
        q, k = turned(q, positions, c.rope_theta), turned(k, positions, c.rope_theta)
    q = q.unflatten(2, (groups, heads // groups))
    scores = torch.einsum("bsgjk,btgk->bgjst", q, k) / math.sqrt(width)
    if c.position == "alibi":  # arXiv 2108.12409: head n of 4 has the slope 4^-n
        distances = (torch.arange(length)[:, None] - torch.arange(length)).abs().double()
        slopes = 4.0 ** -torch.arange(1, heads + 1).double()
        scores = scores - slopes.reshape(groups, heads // groups, 1, 1) * distances
    scores = scores - 1e30 * torch.ones(length, length).double().triu(1)
    mixed = torch.einsum("bgjst,btgk->bsgjk", torch.softmax(scores, -1), v)
    return affine(mixed.flatten(2), w, f"{name}.out")


def feed_forward(x: Tensor, w: Weights, name: str, c: Any) -> Tensor:
    """GELU (arXiv 1606.08415) or SwiGLU (arXiv 2002.05202)."""
    h = affine(x, w, f"{name}.up")
    if c.activation == "swiglu":
        gate, up = h[..., : c.ffn_hidden_size], h[..., c.ffn_hidden_size :]
        h = gate * torch.sigmoid(gate) * up
    elif c.activation == "gelu":
        h = h * (1 + torch.erf(h / math.sqrt(2))) / 2
    else:
        h = h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))) / 2
    return affine(h, w, f"{name}.down")


def decode(w: Weights, c: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    """Logits of a pre-norm decoder (GPT-2, section 2.3)."""
    x = w["embedding.token.weight"][tokens]
    if c.position == "learned":
        x = x + w["embedding.position.weight"][positions]
    for n in range(c.num_layers):
        x = x + attention(norm(x, w, f"blocks.{n}.norm1", c), w, f"blocks.{n}.attn", c, positions)
        x = x + feed_forward(norm(x, w, f"blocks.{n}.norm2", c), w, f"blocks.{n}.mlp", c)
    out = w["embedding.token.weight"] if c.tie_embeddings else w["head.project.weight"]
    return torch.einsum("bsd,vd->bsv", norm(x, w, "head.norm", c), out)


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    logs = logits - torch.logsumexp(logits, -1, keepdim=True)
    return -sum(logs[b, s, labels[b, s]] for b in range(B) for s in range(S) if labels[b, s] >= 0)  # type: ignore


PRODUCT = [shape if shape in QUICK else pytest.param(shape, marks=pytest.mark.wide("layouts")) for shape in SHAPES]


@pytest.mark.parametrize("shape", PRODUCT, ids=lambda s: "-".join(str(v) for k, v in s.items() if k not in SMALL))
def test_loss_logits_and_all_gradients_are_those_of_the_papers(shape: dict[str, Any]) -> None:
    model, given = shaken(shape), batch()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.parameters().items()}
    logits = decode(weights, GPT.Config(**shape), given["tokens"], given["positions"])
    expected = summed_loss(logits, given["labels"])
    expected.backward()
    loss, count = model.loss(given)
    loss.backward()
    assert int(count) == B * S - 1
    torch.testing.assert_close(model.logits(given), logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)  # summed in fp32
    for name, parameter in model.parameters().items():
        assert parameter.grad is not None, name
        right = weights[name].grad
        assert right is not None
        error = float((parameter.grad - right).abs().max() / right.abs().max())
        assert error < 1e-5, name  # rotary angles and the loss are fp32, all else is fp64


# The plan.


def test_projections_into_the_residual_stream_begin_smaller_by_the_root_of_their_number() -> None:
    model = built({**SMALL, "hidden_size": 128, "num_layers": 8, "init_std": 0.1})
    spread = {name: float(p.detach().std()) for name, p in model.parameters().items() if p.dim() == 2}
    for name, found in spread.items():
        residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
        assert found == pytest.approx(0.1 / 4 if residual else 0.1, rel=0.08), name  # 2 x 8 additions
    ones = [p for p in model.parameters().values() if p.dim() == 1]
    assert ones
    assert all(bool((p == 1).all()) for p in ones)


# FLOPs.


def preset(name: str) -> dict[str, Any]:
    chosen: dict[str, Any] = GPT.presets[name]["model"]
    return chosen


# Presets.


@pytest.mark.parametrize("name", sorted(set(GPT.presets) - {"nano"}))
def test_a_preset_has_the_number_of_parameters_that_its_name_states(name: str) -> None:
    digits, unit = float(name[:-1]), {"m": 1e6, "b": 1e9}[name[-1]]
    last_digit = 0.1 if "." in name else 1.0
    numel = sum(parameter.numel() for parameter in on_meta(preset(name)).module.parameters())
    tolerance = max(0.02 * digits, last_digit / 2) * unit  # 1.7b may be anything that rounds to 1.7
    assert abs(numel - digits * unit) <= tolerance, f"{numel:,}"


def test_gpt2_and_gpt3_have_their_published_number_of_parameters() -> None:
    def numel(name: str) -> int:
        return sum(parameter.numel() for parameter in on_meta(preset(name)).module.parameters())

    assert numel("125m") == 124_439_808  # the released 124M model
    assert numel("175b") == pytest.approx(175.0e9, rel=0.005)


# Dropout.


@pytest.mark.parametrize("field", ["dropout", "attention_dropout"])
def test_either_dropout_acts_in_training_and_only_there(field: str) -> None:
    model, plain, given = built({**SMALL, field: 0.3}), built(SMALL), batch()
    exact = float(plain.loss(given)[0].detach())
    assert float(model.loss(given)[0].detach()) != exact
    model.module.eval()
    assert float(model.loss(given)[0].detach()) == exact


# Compiling.


# Refusals.


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_size": 18}, "num_attention_heads=4 does not divide hidden_size=18"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 does not divide num_attention_heads=4"),
        ({"head_dim": 5, "position": "rotary"}, "even head_dim, not 5"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_the_numbers(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        GPT.Config(**{**SMALL, **fields})


def test_a_sequence_longer_than_the_learned_positions_is_refused() -> None:
    learned, rotary = (GPT(GPT.Config(**{**SMALL, "position": p})) for p in ("learned", "rotary"))
    config: Any = SimpleNamespace(trainer=SimpleNamespace(seq_length=10))
    with pytest.raises(UsageError, match=r"seq_length=10.*max_position_embeddings=9"):
        learned.configure(config)
    rotary.configure(config)


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({}, 64),
        ({"activation": "gelu_tanh"}, 64),
        ({"activation": "swiglu"}, 64),  # 8/3 of 16 is 42.7
        ({"activation": "swiglu", "hidden_size": 96}, 256),  # exactly
        ({"activation": "swiglu", "hidden_size": 104}, 320),  # 277.3
        ({"activation": "swiglu", "ffn_hidden_size": 20}, 20),
    ],
)
def test_the_default_width_of_the_feed_forward_part(fields: dict[str, Any], width: int) -> None:
    shape = {**SMALL, **fields}
    down = on_meta(shape).parameters()["blocks.0.mlp.down.weight"]
    assert tuple(down.shape) == (shape["hidden_size"], width)
