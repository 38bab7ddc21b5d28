"""The FLOPs of a model: what they belong to, as its modules state it, and what is computed with frozen parameters."""

from dataclasses import replace
from typing import Any

import mplug_gpt
import pytest
import t5_models
import tiny_models
import torch
from click.testing import CliRunner
from mplug_bench.ceilings import attentions, products
from mplug_bench.measure import checked, facts_of
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mplug import ActivationProduct, Branches, Flops, Init, Model, Parameter, Step, WeightProduct, hookimpl
from mplug.cli import main
from mplug.config.sources import read_assignments
from mplug.model.build import build_model
from mplug.model.memory import allocate
from mplug.model.plans.work import flops_of_work, work_of
from mplug.model.slots.fill import sites
from mplug_nn import AttentionInputs, AttentionSpec
from mplug_nn.specification import unseen
from mplug_testing.harness import tiny_run


class Gated(nn.Module):
    """A foreign block: norm, then a product with its table beside a linear of torch, then products of both results."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 6)
        self.table, self.out = nn.Parameter(torch.zeros(6, 4)), nn.Linear(6, 4, bias=False)

    def plan_work(self) -> Step:
        """The steps, as an author writes them."""
        sides = Branches((WeightProduct("table", 24), WeightProduct("linear.weight", 24)))
        return ("norm", sides, ActivationProduct(Flops(12, 30)), WeightProduct("out.weight", 24))


class Twice(nn.Module):
    """Two of them; it states nothing itself."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))
        self.first, self.second = Gated(), Gated()


def test_each_part_depends_on_what_its_module_states_before_it() -> None:
    found = {work.name: work for work in work_of(Twice(), "blocks.0")}
    assert list(found) == [
        f"blocks.0.{half}{name}"
        for half in ("first", "second")
        for name in (".table", ".linear.weight", "", ".out.weight")
    ]
    first, of = ("blocks.0.bias",), "blocks.0.first"
    assert found[f"{of}.table"].after == found[f"{of}.linear.weight"].after == (*first, f"{of}.norm")
    assert found[of].after == (*first, f"{of}.norm", f"{of}.table", f"{of}.linear.weight")
    assert found[f"{of}.out.weight"].after == found[of].after
    assert found["blocks.0.second.table"].after == (*first, of, "blocks.0.second.norm")
    assert [work.is_weight for work in found.values()] == [True, True, False, True] * 2
    assert {work.unit for work in found.values()} == {"blocks.0"}
    assert flops_of_work(found.values()) == Flops(2 * (3 * 6 * 24 + 12), 60)


def test_a_step_that_a_module_does_not_have_is_refused() -> None:
    class Wrong(Gated):
        def plan_work(self) -> Step:
            return ("norm", "gate")

    with pytest.raises(ValueError, match=r"Wrong\.plan_work names 'gate', which is no submodule and no parameter"):
        work_of(Wrong())


class Silent(nn.Module):
    """x Wᵀ, without a word about it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return x @ self.weight.t()


class Stated(Silent):
    """The same, with a statement."""

    def plan_work(self) -> Step:
        """The product."""
        return WeightProduct("weight", 1024)


def with_block(monkeypatch: pytest.MonkeyPatch, block: type[nn.Module]) -> None:
    """The models of the family gpt have a foreign block in the place of each MLP, and their plans state its FLOPs."""
    build = mplug_gpt.GPT.build_model

    @hookimpl
    def built(self: Any) -> Any:
        model = build(self)
        parameters, per_token = dict(model.plan.parameters), model.plan.flops.per_token
        for number in range(self.config.num_layers):
            old = model.module.blocks[str(number)].mlp
            per_token += 6 * (1024 - old.up.weight.numel() - old.down.weight.numel())
            model.module.blocks[str(number)].mlp = block()
        for name in [one for one in parameters if ".mlp." in one]:
            del parameters[name]
        parameters["blocks.*.mlp.weight"] = Parameter(("mlp", "embed"), Init("normal", std=0.02))
        flops = Flops(per_token, model.plan.flops.per_squared_length)
        model.plan = replace(model.plan, parameters=parameters, flops=flops)
        return model

    monkeypatch.setattr(mplug_gpt.GPT, "build_model", built)


SHAPE = {"model.name": "gpt", "model.num_layers": 3, "model.hidden_size": 32, "model.num_attention_heads": 4}
FROZEN = {**SHAPE, "model.frozen": ["embedding", "blocks.0", "blocks.1.mlp"]}


def test_a_foreign_product_counts_by_its_statement_and_without_one_as_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for block in (Silent, Stated):
        with monkeypatch.context() as patch:
            with_block(patch, block)
            found[block] = build_model(tiny_run(FROZEN)).passes
    silent, stated = found[Silent], found[Stated]
    assert silent.unstated == Flops(3 * 6 * 1024, 0)
    assert stated.unstated == Flops(0, 0)
    assert stated.forward == silent.forward
    # Nothing before the product of block 0 is trained; the product of block 1 has a frozen weight alone.
    assert silent.activations.per_token - stated.activations.per_token == 2 * 1024
    assert silent.weights.per_token - stated.weights.per_token == 2 * 2 * 1024
    assert stated.no_dgrad - silent.no_dgrad == {"blocks.0.mlp.weight"}
    assert stated.no_wgrad - silent.no_wgrad == {"blocks.0.mlp.weight", "blocks.1.mlp.weight"}


def test_explain_says_which_flops_nothing_states(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [word for name, value in SHAPE.items() for word in ("--set", f"{name}={value}")]
    words += ["--set", "trainer.global_batch_size=2", "--set", "trainer.seq_length=16"]
    with_block(monkeypatch, Silent)
    frozen = CliRunner().invoke(main, ["explain", *words, "--set", "model.frozen=[embedding]"])
    assert f"{3 * 6 * 1024 * 2 * 16:,} FLOPs count as if all their passes were computed: no module" in frozen.output
    trained = CliRunner().invoke(main, ["explain", *words])
    assert trained.exit_code == 0
    assert "count as if" not in trained.output


# With frozen parameters, the FLOPs are those of the products that torch computes.


B, S = 2, 16
SPARSE: dict[str, Any] = {**tiny_models.EXPERTS, "model.num_shared_experts": 1, "model.shared_expert_gate": True}
DENSE = {"model.activation": "swiglu", "model.ffn_hidden_size": 64, "model.bias": True}
FROZEN_CASES = [
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


@pytest.mark.parametrize(("model", "frozen"), FROZEN_CASES, ids=str)
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


# Encoders: attention counts the pairs of positions that its masks leave.

ENCODER: dict[str, Any] = {
    "model.name": "bert",
    "model.num_layers": 3,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.ffn_hidden_size": 48,
    "model.vocab_size": 61,
    "kernels.default": None,
}
MODERN = {**ENCODER, "model.name": "modernbert", "model.attention_types": ["full", "window", "window"]}
TEXT = 12
"""The tokens of T5's encoder."""
BOTH: dict[str, Any] = {
    "model.name": "t5",
    "model.preset": "tiny",
    "model.vocab_size": 61,
    "model.encoder_length": TEXT,
    "kernels.default": None,
    "data.name": "spans",
    "data.of": {"name": "mock", "vocab_size": 50},
    "data.sentinels": 10,
    "data.end_token": 1,
    "data.encoder_length": TEXT,
}


def counted_by_torch(settings: dict[str, Any], batch: dict[str, Tensor]) -> tuple[Model, int]:
    """The model, and the FLOPs of a forward and a backward pass: attention in plain torch computes all pairs."""
    model = build_model(tiny_run(settings))
    allocate(model, 0, torch.device("cpu"), torch.float32, seed=1)
    for parameter in model.parameters().values():
        torch.nn.init.normal_(parameter)
    with FlopCounterMode(display=False) as counter:
        model.loss(batch)[0].backward()
    return model, counter.get_total_flops()


@pytest.mark.parametrize("frozen", [[], ["embedding", "blocks.0"]])
def test_attention_in_both_directions_counts_all_pairs(frozen: list[str]) -> None:
    tokens = torch.arange(B * S).view(B, S)
    batch = {"tokens": tokens, "labels": tokens, "positions": torch.arange(S)[None], "keys": torch.arange(B)}
    model, found = counted_by_torch({**ENCODER, "model.frozen": frozen}, batch)
    assert model.flops.of(B * S, B * S**2) == found


def test_both_streams_of_an_encoder_with_a_decoder_count_what_is_computed() -> None:
    """Half of the pairs of the decoder, all pairs of the encoder and of a token with the encoder's output."""
    model, found = counted_by_torch(BOTH, t5_models.micro_batch((TEXT,), S))
    (of_text,) = model.stream_passes.values()
    masked = model.flops.per_squared_length * S**2
    assert model.flops.of(S, S**2) + masked + of_text.flops.of(TEXT, TEXT**2) == found
    assert masked > 0


def seen(settings: dict[str, Any], lengths: list[int]) -> int:
    """FLOPs of attention, counted pair by pair over the masks of all sites, for sequences of these lengths."""
    total = 0
    for site in sites(build_model(tiny_run(settings)).module):
        if site.slot == "Attention.core":
            spec = site.module.spec
            hidden = [[*unseen(spec, AttentionInputs(), one, one, torch.device("cpu"))] for one in lengths]
            pairs = sum(
                int((~sum(masks, torch.zeros(one, one, dtype=torch.bool))).sum())
                for one, masks in zip(lengths, hidden, strict=True)
            )
            total += 6 * site.module.num_heads * (spec.key_width + spec.value_width) * pairs
    return total


@pytest.mark.parametrize("window", [1, 5, S, 2 * S])
def test_windows_in_both_directions_count_the_pairs_inside_of_them(window: int) -> None:
    settings = {**MODERN, "model.window": window}
    model = build_model(tiny_run(settings))
    assert model.flops.of_pairs.of(3 * S, 3 * S**2) == seen(settings, [S] * 3)
    frozen = build_model(tiny_run({**settings, "model.frozen": ["embedding", "blocks"]}))
    assert 3 * frozen.flops.of_pairs.of(S, S**2) == seen(settings, [S])  # forward alone


@pytest.mark.parametrize("window", [1, 5, S, 2 * S])
def test_a_causal_window_counts_what_it_shows(window: int) -> None:
    """But for half a pair for each of its keys: causal attention, too, counts S² / 2 of S (S + 1) / 2 pairs."""
    spec = AttentionSpec(1.0, 8, 8, causal=True, window=window)
    hidden = torch.stack([*unseen(spec, AttentionInputs(), S, S, torch.device("cpu"))]).any(dim=0)
    found = spec.flops(2)
    assert found.of(2 * S, 2 * S**2) == 4 * int((~hidden).sum()) - 2 * min(window, S)
    assert (found.of(S, S**2) == replace(spec, window=None).flops(2).of(S, S**2)) == (window >= S)
