"""Mixtral keeps the contract of models, and its loss and gradients are those of the papers' formulas."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoder_suites import DecoderSuite, FurtherDecoderSuite
from layout_words import COMPILING
from mplug_mixtral import Mixtral
from papers import Weights, decode, gated
from tiny_models import EXPERTS
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from mplug import Model
from mplug.registry.entry_points import Registry
from mplug_testing.model_checks import Trial

FINE: dict[str, Any] = {
    **EXPERTS,
    "model.num_layers": 3,
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
DIVIDE_EXPERTS = ("ep", "etp")
OTHERS = [name for name in Registry().names("parallel") if name not in (*DIVIDE_EXPERTS, "deepspeed")]
"""DeepSpeed refuses layouts that divide experts."""


@pytest.mark.wide("layouts", tests=["test_a_layout_gives_the_run_of_one_process"], quick=["dp2etp2", "tp2ep2"])
class TestMixtral(FurtherDecoderSuite):
    """Each strategy once together with one that divides experts; the wide set has every pair."""

    plugin = "mixtral"
    settings = {**EXPERTS, "model.num_layers": 3, "model.moe_router_jitter": 0.1, "model.z_loss_coefficient": 1e-3}
    layouts = ("ep2etp2", *(f"{other}2{DIVIDE_EXPERTS[n % 2]}2" for n, other in enumerate(OTHERS)))


@pytest.mark.wide("layouts", tests=["test_a_layout_gives_the_run_of_one_process"])
class TestMixtralOfFineGrainedExperts(DecoderSuite):
    plugin = "mixtral"
    settings = FINE
    layouts = ("pp2tp2",)
    checks_fields = False

    def reference(self, weights: Any, batch: Any, config: Any) -> Tensor:
        def feed_forward(h: Tensor, n: int) -> Tensor:
            own = {name.removeprefix(f"blocks.{n}."): w for name, w in weights.items() if f"blocks.{n}." in name}
            return swiglu(h, own, "mlp") if n < config.num_dense_layers else mixture(h, own, config)

        described = SimpleNamespace(**config.model_dump(), norm="rmsnorm", position="rotary", tie_embeddings=False)
        return decode(weights, described, batch["tokens"], batch["positions"], feed_forward)


def swiglu(x: Tensor, w: Weights, name: str) -> Tensor:
    return gated(x @ w[f"{name}.up.weight"].T) @ w[f"{name}.down.weight"].T


def mixture(x: Tensor, w: Weights, c: Any) -> Tensor:
    """Token by token: the gates' sum of the chosen experts (arXiv 2401.04088), chosen by arXiv 2412.19437."""
    rows, size = [], c.num_experts // c.moe_router_num_groups
    for token in x.reshape(-1, x.shape[-1]):
        scores = torch.sigmoid(w["moe.router.weight"] @ token)
        judged = scores.detach() + w["moe.router.bias"]
        worth = judged.reshape(-1, size).sort(1).values[:, -2:].sum(1)
        kept = worth.argsort(descending=True)[: c.moe_router_top_groups].tolist()
        allowed = [e for e in range(c.num_experts) if e // size in kept]
        chosen = sorted(allowed, key=lambda e, judged=judged: -float(judged[e]))[: c.num_experts_per_token]
        gates = scores[chosen] / scores[chosen].sum() * c.moe_router_scale
        up, down = w["moe.experts.up"], w["moe.experts.down"]
        rows.append(sum(down[e] @ gated(up[e] @ token) * gate for e, gate in zip(chosen, gates, strict=True)))
    y = torch.stack(rows).reshape(x.shape)
    return y + torch.sigmoid(x @ w["moe.shared_gate.weight"].T) * swiglu(x, w, "moe.shared")


def test_states_are_saved_and_statistics_are_not() -> None:
    states = Trial.of({"model.name": "mixtral", **FINE}).model.states()
    assert {name.partition("blocks.1.moe.router.")[2] for name in states} - {""} == {"bias", "last_load"}
    assert all(not state.any() for state in states.values())


def on_meta(shape: dict[str, Any]) -> Model:
    with torch.device("meta"):
        return Mixtral(Mixtral.Config(**shape)).build_model()


def test_a_sparse_block_weighs_in_a_pipeline_what_a_token_is_multiplied_with() -> None:
    model = TestMixtralOfFineGrainedExperts().on_meta()
    attention = 32 * (32 + 2 * 16) + 32 * 32
    assert model.unit_weight("blocks.0") == attention + 3 * 32 * 24
    assert model.unit_weight("blocks.1") == attention + 8 * 32 + 3 * 3 * 32 * 16 + 3 * 32 * 16 + 32


# Sizes.


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("8x7b", 46.7, 12.9), ("8x22b", 140.6, 39.1), ("fine16b", 16.4, 2.8), ("8b", 7.9, 2.3)],
)
def test_a_preset_has_its_published_parameters_in_billions(name: str, total: float, active: float) -> None:
    shape = Mixtral.presets[name]["model"]
    model, config = on_meta(shape), Mixtral.Config(**shape)
    numbers = {name: parameter.numel() for name, parameter in model.parameters().items()}
    experts = sum(number for name, number in numbers.items() if ".experts." in name)
    idle = experts - experts * config.num_experts_per_token // config.num_experts
    found = sum(numbers.values())
    assert [found / 1e9, (found - idle) / 1e9] == pytest.approx([total, active], rel=0.02)


def test_a_dense_decoder_twice_as_wide_has_the_flops_of_the_8b_preset() -> None:
    shape = Mixtral.presets["8b"]["model"]
    hidden, queries, keys = 2048, 2048, 4 * 128
    dense = 24 * (hidden * (2 * queries + 2 * keys) + 3 * hidden * 12800) + hidden * 32000
    router = 24 * hidden * Mixtral.Config(**shape).num_experts
    assert on_meta(shape).plan.flops.per_token == 6 * (dense + router)


# Compiling.


@COMPILING
@pytest.mark.wide("compile")
def test_all_sparse_blocks_are_one_compiled_graph_that_gives_the_same_bits() -> None:
    more = {"model.num_layers": 4, "model.moe_router_jitter": 0.1, "model.capacity_factor": 1.0}
    torch.compiler.reset()
    plain, compiled = (Trial.of({"model.name": "mixtral", **FINE, **more}) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    blocks: Any = compiled.model.module.get_submodule("blocks")
    for block in blocks.values():
        block.forward = torch.compile(block.forward, backend=counter, fullgraph=True)
    given = plain.batches[:1]
    assert torch.equal(plain.loss(given[0])[0], compiled.loss(given[0])[0])
    assert counter.frame_count == 2  # a dense block, and the others
    expected = plain.gradients(given)
    for name, gradient in compiled.gradients(given).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    for name, counted in plain.model.buffers().items():
        assert torch.equal(counted, compiled.model.buffers()[name]), name
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
        Mixtral.Config(**{"num_attention_heads": 4, "num_experts": 4, "num_layers": 2, **fields})
