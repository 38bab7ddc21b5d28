"""Mixtral keeps the contract of models, and its loss and gradients are those of the papers' formulas."""

import math
from typing import Any

import pytest
import torch
from decoder_fields import examples_of, of_a_family
from library_reference import library_logits
from mplug_mixtral import Mixtral
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from mplug import Mesh, Model
from mplug.model.memory import allocate, initialize
from mplug.registry.entry_points import Registry
from mplug.tensors.random import sample_keys
from mplug_testing import ModelSuite

B, S, V = 2, 6, 13
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": V,
    "ffn_hidden_size": 12,
    "num_experts": 4,
    "aux_loss_coefficient": 0.0,
}
FINE: dict[str, Any] = {
    **SMALL,
    "num_layers": 3,
    "num_dense_layers": 1,
    "moe_ffn_hidden_size": 6,
    "num_experts": 6,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "shared_expert_gate": True,
    "moe_router_score": "sigmoid",
    "moe_router_num_groups": 3,
    "moe_router_top_groups": 2,
    "moe_router_scale": 1.5,
    "expert_bias_rate": 1e-3,
    "qk_norm": True,
}


def on_meta(shape: dict[str, Any]) -> Model:
    with torch.device("meta"):
        return Mixtral(Mixtral.Config(**shape)).build_model()


def built(shape: dict[str, Any], seed: int = 1) -> Model:
    """The model with memory and initial values, on one process."""
    model = on_meta(shape)
    model.place(Mesh.of([], 1), None)
    model.keep_stage(0)
    allocate(model, 0, torch.device("cpu"), torch.float32, seed)
    initialize(model.parameters(), model.placements, 0, seed)
    return model


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(V, (B, S + 1), generator=torch.Generator().manual_seed(0))
    labels, ids = tokens[:, 1:].clone(), torch.arange(B)
    labels[0, 2] = -100
    positions, keys = torch.arange(S)[None], sample_keys(1, 1, ids)
    return {"tokens": tokens[:, :-1], "labels": labels, "positions": positions, "sample_ids": ids, "keys": keys}


# The contract.

TINY = {
    "model.num_layers": 3,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.vocab_size": 259,
    "model.ffn_hidden_size": 32,
    "model.num_experts": 4,
    "model.init_std": 0.06,
}


DIVIDE_EXPERTS = ("ep", "etp")
NO_EXPERTS = ("deepspeed",)
"""Strategies that refuse layouts that divide experts."""
OTHERS = [name for name in Registry().names("parallel") if name not in (*DIVIDE_EXPERTS, *NO_EXPERTS)]


WIDE = pytest.mark.wide("suites")
"""The suites of llama and deepseek test the fields that all decoders share in the quick set."""


class TestMixtral(ModelSuite):
    """Each strategy once together with one that divides experts; the wide set has every pair."""

    plugin = "mixtral"
    settings = {**TINY, "model.moe_router_jitter": 0.1, "model.z_loss_coefficient": 1e-3}
    layouts = ("ep2etp2", *(f"{other}2{DIVIDE_EXPERTS[n % 2]}2" for n, other in enumerate(OTHERS)))
    positions = "relative"
    examples = examples_of(Mixtral.Config.model_fields)
    beside = of_a_family(Mixtral.Config.model_fields)

    def reference(self, weights: Any, batch: Any, config: Any) -> Tensor:
        return library_logits(self, weights, batch["tokens"])

    @WIDE
    def test_every_field_of_its_config_has_an_effect(self) -> None:
        super().test_every_field_of_its_config_has_an_effect()


class TestMixtralOfFineGrainedExperts(ModelSuite):
    plugin = "mixtral"
    settings = {
        **TINY,
        "model.num_dense_layers": 1,
        "model.moe_ffn_hidden_size": 16,
        "model.num_experts": 8,
        "model.num_experts_per_token": 3,
        "model.num_shared_experts": 1,
        "model.shared_expert_gate": True,
        "model.moe_router_score": "sigmoid",
        "model.moe_router_num_groups": 4,
        "model.moe_router_top_groups": 2,
        "model.moe_balance": "global_batch",
        "model.expert_bias_rate": 1e-2,
        "model.qk_norm": True,
    }
    layouts = ("pp2tp2",)
    positions = "relative"
    checks_fields = False

    def reference(self, weights: Any, batch: Any, config: Any) -> Tensor:
        return decode(weights, weights, config, batch["tokens"])


# An independent implementation, from the papers.

Weights = dict[str, Tensor]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (arXiv 1910.07467)."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turned(x: Tensor, theta: float) -> Tensor:
    """Rotary positions (arXiv 2104.09864): coordinates i and i + K/2 are a plane, turned by position theta^(-2i/K)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None].double() * torch.tensor(
        [theta ** (-i / half) for i in range(half)], dtype=torch.float64
    )
    cos, sin = torch.cos(angles)[None, :, None], torch.sin(angles)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attention(x: Tensor, w: Weights, name: str, c: Any) -> Tensor:
    """Causal attention with grouped heads (arXiv 2305.13245) and QK-norm (arXiv 2010.04245)."""
    heads, groups, length = c.num_attention_heads, c.num_kv_heads, x.shape[1]
    rows = (x @ w[f"{name}.qkv.weight"].T).unflatten(-1, (heads + 2 * groups, -1))
    width = rows.shape[-1]
    q, k, v = rows[:, :, :heads], rows[:, :, heads : heads + groups], rows[:, :, heads + groups :]
    if c.qk_norm:
        q, k = (norm(t, w[f"{name}.{which}_norm"], c.norm_eps) for t, which in ((q, "q"), (k, "k")))
    q, k = turned(q, c.rope_theta), turned(k, c.rope_theta)
    q = q.unflatten(2, (groups, heads // groups))
    scores = torch.einsum("bsgjk,btgk->bgjst", q, k) / math.sqrt(width)
    weights = torch.softmax(scores - 1e30 * torch.ones(length, length).double().triu(1), -1)
    mixed = torch.einsum("bgjst,btgk->bsgjk", weights, v).flatten(2)
    return mixed @ w[f"{name}.out.weight"].T


def swiglu(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU (arXiv 2002.05202), the gate's matrix first."""
    gate, value = (x @ up.T).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * value) @ down.T


def mixture(x: Tensor, w: Weights, name: str, c: Any, bias: Tensor | None) -> Tensor:
    """Token by token: the gates' sum of the chosen experts (arXiv 2401.04088), chosen by arXiv 2412.19437."""
    rows, size = [], c.num_experts // c.moe_router_num_groups
    for token in x.reshape(-1, x.shape[-1]):
        logits = w[f"{name}.router.weight"] @ token
        scores = torch.softmax(logits, 0) if c.moe_router_score == "softmax" else torch.sigmoid(logits)
        judged = scores.detach() if bias is None else scores.detach() + bias
        groups = judged.reshape(-1, size)
        worth = groups.sort(1).values[:, -2:].sum(1)
        kept = worth.argsort(descending=True)[: c.moe_router_top_groups].tolist()
        allowed = [e for e in range(c.num_experts) if c.moe_router_num_groups == 1 or e // size in kept]
        chosen = sorted(allowed, key=lambda e, judged=judged: -float(judged[e]))[: c.num_experts_per_token]
        gates = scores[chosen]
        if c.moe_router_normalize:
            gates = gates / gates.sum()
        experts = [
            swiglu(token, w[f"{name}.experts.up"][e], w[f"{name}.experts.down"][e]) * gate * c.moe_router_scale
            for e, gate in zip(chosen, gates, strict=True)
        ]
        rows.append(sum(experts[1:], experts[0]))
    y = torch.stack(rows).reshape(x.shape)
    if c.num_shared_experts:
        shared = swiglu(x, w[f"{name}.shared.up.weight"], w[f"{name}.shared.down.weight"])
        y = y + torch.sigmoid(x @ w[f"{name}.shared_gate.weight"].T) * shared
    return y


def decode(w: Weights, states: Weights, c: Any, tokens: Tensor) -> Tensor:
    """Logits of a pre-norm decoder."""
    x = w["embedding.token.weight"][tokens]
    for n in range(c.num_layers):
        name = f"blocks.{n}"
        x = x + attention(norm(x, w[f"{name}.norm1.weight"], c.norm_eps), w, f"{name}.attn", c)
        h = norm(x, w[f"{name}.norm2.weight"], c.norm_eps)
        if n < c.num_dense_layers:
            x = x + swiglu(h, w[f"{name}.mlp.up.weight"], w[f"{name}.mlp.down.weight"])
        else:
            x = x + mixture(h, w, f"{name}.moe", c, states.get(f"{name}.moe.router.bias"))
    return norm(x, w["head.norm.weight"], c.norm_eps) @ w["head.project.weight"].T


# The plan.


def test_states_are_saved_and_statistics_are_not() -> None:
    model = built({**FINE, "moe_balance": "global_batch"})
    assert {name.partition("blocks.1.moe.router.")[2] for name in model.states()} - {""} == {"bias", "last_load"}
    assert all(not state.any() for state in model.states().values())


def test_a_sparse_block_weighs_in_a_pipeline_what_a_token_is_multiplied_with() -> None:
    model = on_meta(FINE)
    attention = 16 * (16 + 2 * 8) + 16 * 16
    assert model.unit_weight("blocks.0") == attention + 3 * 16 * 12
    assert model.unit_weight("blocks.1") == attention + 6 * 16 + 3 * 3 * 16 * 6 + 3 * 16 * 12 + 16


# Sizes.


def preset(name: str) -> dict[str, Any]:
    chosen: dict[str, Any] = Mixtral.presets[name]["model"]
    return chosen


def numbers(name: str) -> tuple[int, int]:
    """(parameters, those that take part in a token) of a preset."""
    model, config = on_meta(preset(name)), Mixtral.Config(**preset(name))
    total = sum(parameter.numel() for parameter in model.module.parameters())
    experts = sum(p.numel() for n, p in model.parameters().items() if ".experts." in n)
    return total, total - experts + experts * config.num_experts_per_token // config.num_experts


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("8x7b", 46.7, 12.9), ("8x22b", 140.6, 39.1), ("fine16b", 16.4, 2.8), ("8b", 7.9, 2.3)],
)
def test_a_preset_has_its_published_parameters_in_billions(name: str, total: float, active: float) -> None:
    found = [count / 1e9 for count in numbers(name)]
    assert found == pytest.approx([total, active], rel=0.02)


def test_a_dense_decoder_twice_as_wide_has_the_flops_of_the_8b_preset() -> None:
    config = Mixtral.Config(**preset("8b"))
    hidden, queries, keys = 2048, 2048, 4 * 128
    dense = 24 * (hidden * (2 * queries + 2 * keys) + 3 * hidden * 12800) + hidden * 32000
    found = on_meta(preset("8b")).plan.flops
    assert found.per_token == pytest.approx(6 * dense, rel=3e-4)  # the router is what is more
    assert found.per_token - 6 * dense == 6 * 24 * hidden * config.num_experts


# Compiling.


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_all_sparse_blocks_are_one_compiled_graph_that_gives_the_same_bits() -> None:
    shape = {**FINE, "num_layers": 4, "aux_loss_coefficient": 0.1, "moe_router_jitter": 0.1, "capacity_factor": 1.0}
    torch.compiler.reset()
    plain, compiled, given = built(shape), built(shape), batch()
    counter = CompileCounterWithBackend("aot_eager")
    blocks: Any = compiled.module.get_submodule("blocks")
    for block in blocks.values():
        block.forward = torch.compile(block.forward, backend=counter, fullgraph=True)
    losses = [model.loss(given)[0] for model in (plain, compiled)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert counter.frame_count == 2  # a dense block, and the others
    expected = {name: parameter.grad for name, parameter in plain.parameters().items()}
    for name, parameter in compiled.parameters().items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    for name, counted in plain.buffers().items():
        assert torch.equal(counted, compiled.buffers()[name]), name
    torch.compiler.reset()


# Refusals.


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_size": 18}, "num_attention_heads=4 does not divide hidden_size=18"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 does not divide num_attention_heads=4"),
        ({"head_dim": 5}, "even head_dim, not 5"),
        ({"moe_router_num_groups": 3}, "moe_router_num_groups=3 does not divide num_experts=4"),
        ({"moe_router_top_groups": 2}, "moe_router_top_groups=2 is more than 1 groups"),
        ({"moe_router_num_groups": 4, "num_experts_per_token": 2}, "=2 is more than the 1 experts to choose from"),
        ({"num_experts_per_token": 5}, "num_experts_per_token=5 is more than the 4 experts"),
        ({"num_dense_layers": 2}, "num_dense_layers=2 leaves none of 2"),
        ({"shared_expert_gate": True}, "num_shared_experts is 0"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_the_numbers(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Mixtral.Config(**{**SMALL, **fields})
