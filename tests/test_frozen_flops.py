"""The FLOPs of a run with frozen parameters are those of the products that torch computes."""

from typing import Any

import pytest
import tiny_models
import torch
from mplug_bench.ceilings import attentions, products
from mplug_bench.measure import checked, facts_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mplug.config.sources import read_assignments
from mplug.model.build import build_model
from mplug.model.memory import allocate
from mplug.model.slots.fill import sites
from mplug_testing.harness import tiny_run

B, S = 2, 16
SPARSE: dict[str, Any] = {**tiny_models.EXPERTS, "model.num_shared_experts": 1, "model.shared_expert_gate": True}
DENSE = {"model.activation": "swiglu", "model.ffn_hidden_size": 64, "model.bias": True}
CASES = [
    (DENSE, []),
    (DENSE, ["embedding", "blocks.0"]),
    (DENSE, ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]),
    (DENSE, ["blocks", "head"]),
    (DENSE, ["embedding", "head", "blocks.*.attn.qkv", "blocks.*.attn.out", "blocks.*.mlp", "blocks.*.norm1"]),
    (DENSE, ["embedding", "blocks.*.mlp.up.weight", "blocks.0.norm1", "blocks.0.attn", "blocks.1"]),
    ({**DENSE, "model.tie_embeddings": True}, ["embedding", "blocks.0"]),
    (SPARSE, ["embedding", "blocks.0"]),
    (SPARSE, ["embedding", "blocks.*.moe.experts"]),
    (
        SPARSE,
        ["embedding", "blocks.0.norm1", "blocks.0.attn", "blocks.0.norm2", "blocks.0.moe.router", "blocks.1", "head"],
    ),
]


class Core(torch.autograd.Function):
    """In the place of attention: multiplies nothing, and notes what causal attention would, once for each pass."""

    noted = 0

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.width = 2 * q.shape[2] * q.shape[3]
        Core.noted += ctx.width
        ctx.save_for_backward(q, k, v)
        return v.new_zeros(*q.shape[:3], v.shape[3])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        Core.noted += 2 * ctx.width
        return tuple(torch.ones_like(x) for x in ctx.saved_tensors)


def counted(settings: dict[str, Any]) -> tuple[tuple[int, int], tuple[int, int]]:
    """(FLOPs a token, a squared length) as torch counts a forward and a backward pass, and as the model states them."""
    model = build_model(tiny_run({"kernels.default": None, **settings}))
    allocate(model, 0, torch.device("cpu"), torch.float32, seed=1)
    for parameter in model.parameters().values():
        torch.nn.init.normal_(parameter)
    for site in sites(model.module):
        if site.slot == "Attention.core":
            site.module.core = lambda q, k, v, *_, **__: Core.apply(q, k, v)
    tokens = torch.arange(B * S).view(B, S)
    batch = {"tokens": tokens, "labels": tokens, "positions": torch.arange(S)[None], "keys": torch.arange(B)}
    Core.noted = 0
    with FlopCounterMode(display=False) as counter:
        model.loss(batch)[0].backward()
    stated = model.flops
    return (counter.get_total_flops() // (B * S), Core.noted), (stated.per_token, stated.per_squared_length)


@pytest.mark.parametrize(("model", "frozen"), CASES, ids=str)
def test_flops_are_those_of_the_products_that_are_computed(model: dict[str, Any], frozen: list[str]) -> None:
    found, stated = counted({**model, "model.frozen": frozen})
    assert found == stated


@pytest.mark.parametrize("layout", ["", "pp2"])
def test_a_bench_counts_what_is_computed_and_its_limits_are_of_that_work(layout: str) -> None:
    words = ["model.num_layers=4", "model.hidden_size=32", "model.num_attention_heads=2", "trainer.seq_length=32"]
    words += ["model.frozen=[embedding, blocks.0, blocks.1]", f"parallel.layout={layout}", "trainer.micro_batch_size=2"]
    run, model = checked(read_assignments(words))
    facts, samples = facts_of(run, model), run.config.trainer.global_batch_size
    attention = facts.flops_full - facts.flops
    assert facts.flops < model.plan.flops.of(samples * 32, samples * 32**2)
    assert attention == model.flops.of(0, samples * 32**2)
    ranks = range(run.mesh.world_size)
    models = []
    for rank in ranks:
        run.rank = rank
        models.append(build_model(run))
    own = [sum(work.flops * work.calls for work in products(run, one)) for one in models]
    assert sum(own) == facts.flops - attention
    for work in (work for one in models for work in attentions(run, one)):
        work.prepare()()
    backward = sum(work.flops * work.calls for one in models for work in attentions(run, one) if work.flops % 7 == 0)
    assert backward * 6 == 7 * model.plan.flops.of(0, samples * 32**2) // 2
