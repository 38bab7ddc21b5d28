"""From a plan to memory: initial values, tied parameters, slots and bytes."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mplug_nn
from mplug import (
    Axis,
    Flops,
    Init,
    Mesh,
    Model,
    Offer,
    Parameter,
    Plan,
    Segment,
    Unit,
    UsageError,
    Wrap,
    contiguous,
)
from mplug.config.binding import Kernels
from mplug.model import memory as model_module
from mplug.model.build import build_model
from mplug.model.memory import allocate, initialize
from mplug.model.slots.fill import fill_slots, select_offers, sites
from mplug.model.units import run_units
from mplug.registry.entry_points import Registry
from mplug_estimates import measure_bytes
from mplug_nn import (
    MLP,
    SLOTS,
    Activation,
    Attention,
    DotProductAttention,
    Dropout,
    Embedding,
    Inits,
    Linear,
    Loss,
    Norm,
    describe,
)
from mplug_testing.harness import tiny_run

V, D, K, FFN = 10, 6, 4, 8
NORMAL, ONES = Init("normal", std=0.5), Init("constant", value=1.0)
CPU = torch.device("cpu")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm(D, "rmsnorm")
        self.attn = Attention(D, 4, 2, K, bias=True, qk_norm=False, theta=None)
        self.mlp = MLP(D, FFN, "swiglu", bias=False)
        self.dropout = Dropout(0.1)


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Embedding(V, D)
        self.blocks = nn.ModuleDict({str(number): Layer() for number in range(2)})
        self.project = Linear(D, V, bias=False)
        self.project.weight = self.table.weight


VOCAB = Segment("vocab", V, uneven="pad")
with torch.device("meta"):
    PARAMETERS = {**describe(Toy(), Inits(NORMAL, Init("normal", std=0.1))).parameters}
BIAS = "blocks.*.attn.qkv.bias"
PARAMETERS[BIAS] = replace(PARAMETERS[BIAS], init=Init("constant", value=0.25))
UNITS = tuple(Unit(name, (), ()) for name in ("table", "blocks.0", "blocks.1", "project"))


def toy(**changes: Parameter) -> Model:
    with torch.device("meta"):
        return Model(Toy(), Plan(UNITS, {**PARAMETERS, **changes}, {}, {}, Flops(0, 0)))


def mesh(tp: int, dp: int = 1) -> Mesh:
    axes = [Axis("tp", tp, splits=("heads", "kv_heads", "mlp", "vocab"))]
    return Mesh.of([*axes, Axis("dp", dp, entries={"batch": contiguous}, distance=9)], tp * dp)


def filled(on: Mesh, rank: int = 0, seed: int = 1, model: Model | None = None) -> Model:
    model = toy() if model is None else model
    model.place(on, None)
    allocate(model, rank, CPU, torch.float32, seed)
    initialize(model.parameters(), model.placements, rank, seed)
    return model


def values(model: Model) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.parameters().items()}


# Initial values.


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (4, 1), (2, 2), (1, 3)])
def test_initial_values_do_not_depend_on_how_a_tensor_is_cut(tp: int, dp: int) -> None:
    whole, on = values(filled(mesh(1))), mesh(tp, dp)
    for rank in range(on.world_size):
        model = filled(on, rank)
        for name, local in values(model).items():
            rest = local.clone()
            for box in model.placements[name].boxes(rank):
                here = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
                there = tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))
                assert torch.equal(local[here], whole[name][there]), (rank, name)
                rest[here] = 0
            assert not rest.any(), f"the padding of {name} is not zero"


def test_initial_values_depend_on_seed_and_parameter_and_not_on_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = values(filled(mesh(1), seed=1)), values(filled(mesh(1), seed=2))
    assert not torch.equal(one["table.weight"], other["table.weight"])
    assert not torch.equal(one["blocks.0.mlp.up.weight"], one["blocks.1.mlp.up.weight"])
    assert torch.equal(one["blocks.0.norm.weight"], torch.ones(D))
    assert torch.equal(one["blocks.0.attn.qkv.bias"], torch.full((32,), 0.25))
    whole = values(filled(mesh(2), rank=1))
    monkeypatch.setattr(model_module, "CHUNK", 7)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in values(filled(mesh(2), rank=1)).items())


@pytest.mark.parametrize(("rows", "columns"), [(200, 300), (300, 200)])
def test_initial_values_are_all_different_and_have_the_standard_deviation_of_the_plan(rows: int, columns: int) -> None:
    plan = Plan((Unit("0", (), ()),), {"0.weight": Parameter(("out", "in"), NORMAL)}, {}, {}, Flops(0, 0))
    with torch.device("meta"):
        model = Model(nn.Sequential(Linear(columns, rows, bias=False)), plan)
    weight = values(filled(Mesh.of([], 1), 0, 3, model))["0.weight"].double()
    assert float(weight.mean()) == pytest.approx(0, abs=5 * 0.5 / 60000**0.5)
    assert float(weight.std()) == pytest.approx(0.5, rel=5 / 120000**0.5)
    assert len(weight.unique()) > 59900  # of 60000 fp32 numbers a few agree by chance


@pytest.mark.parametrize(
    ("init", "uniform"),
    [
        (Init("uniform", low=-2.0, high=3.0), lambda x: x),
        (Init("log of uniform", low=1.0, high=16.0), torch.exp),
        (Init("time step", low=1e-3, high=0.1), lambda x: nn.functional.softplus(x).log()),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_initial_values_have_the_distribution_of_the_plan(init: Init, uniform: Callable[[Tensor], Tensor]) -> None:
    plan = Plan((Unit("0", (), ()),), {"0.weight": Parameter(("out", "in"), init)}, {}, {}, Flops(0, 0))
    with torch.device("meta"):
        model = Model(nn.Sequential(Linear(100, 100, bias=False)), plan)
    drawn = uniform(values(filled(Mesh.of([], 1), 0, 3, model))["0.weight"].double()).flatten()
    low, high = (math.log(init.low), math.log(init.high)) if init.kind == "time step" else (init.low, init.high)
    shares = torch.histc((drawn - low) / (high - low), bins=10, min=0, max=1) / len(drawn)
    assert float(shares.sum()) == pytest.approx(1)
    assert (shares - 0.1).abs().max() < 5 * (0.09 / len(drawn)) ** 0.5


def test_a_distribution_of_logarithms_needs_positive_bounds() -> None:
    with pytest.raises(ValueError, match="'log of uniform' need 0 < low <= high"):
        Init("log of uniform", low=0.0, high=1.0)


def test_tied_parameters_stay_tied_and_count_once() -> None:
    model = filled(mesh(2), rank=1)
    module: Any = model.module
    assert module.project.weight is module.table.weight
    assert "project.weight" not in model.parameters()
    assert tuple(module.project.weight.shape) == (5, D)


def test_every_site_gets_a_key_of_its_own_that_depends_on_the_seed_and_not_on_the_rank() -> None:
    def keys(rank: int, seed: int) -> list[int]:
        return [int(buffer) for _, buffer in filled(mesh(2), rank, seed).module.named_buffers()]

    assert len(set(keys(0, 1))) == 4  # an attention and a dropout in each of two blocks
    assert keys(0, 1) == keys(1, 1)
    assert not set(keys(0, 1)) & set(keys(0, 2))


def test_a_buffer_that_nobody_initializes_is_refused_by_its_name() -> None:
    model = toy()
    model.module.register_buffer("history", torch.zeros(3, device="meta"))
    model.place(mesh(1), None)
    with pytest.raises(ValueError, match="history"):
        allocate(model, 0, CPU, torch.float32, 1)


@pytest.mark.parametrize(
    ("parameter", "said"),
    [
        (Parameter(("embed",), NORMAL), "1 dimensions"),
        (Parameter((Segment("vocab", V - 1), "embed"), NORMAL), "do not sum to"),
        (Parameter((VOCAB, (Segment("a", 2), Segment("b", 3))), NORMAL), "do not sum to"),
    ],
)
def test_a_plan_of_another_shape_is_refused_naming_the_parameter(parameter: Parameter, said: str) -> None:
    with pytest.raises(ValueError, match=rf"'table\.weight'.*{said}|{said}.*'table\.weight'"):
        toy(**{"table.weight": parameter}).place(mesh(1), None)


class Adder(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, 2 * x


def test_units_run_as_modules_in_order_and_pass_values_on_by_their_names() -> None:
    module = nn.ModuleDict({"one": Adder(), "two": Adder()})
    units = (Unit("one", ("a", "b"), ("c",)), Unit("two", ("c",), ("c", "d"), method="both"))
    found = run_units(module, units, {"a": torch.tensor(1), "b": torch.tensor(2)})
    assert {name: int(value) for name, value in found.items()} == {"a": 1, "b": 2, "c": 3, "d": 6}
    module, heard = nn.ModuleDict({"one": Adder()}), list[str]()
    module["one"].register_forward_pre_hook(lambda *_: heard.append("before"))
    module["one"].register_forward_hook(lambda *_: heard.append("after"))
    run_units(module, (Unit("one", ("a", "a"), ("c",)),), {"a": torch.tensor(1)})
    assert heard == ["before", "after"]
    units = (Unit("one", ("a",), ("c",), method="both"),)
    with pytest.raises(ValueError, match="zip"):
        run_units(nn.ModuleDict({"one": Adder()}), units, {"a": torch.tensor(1)})


# Slots: sites.


def test_every_slot_of_every_module_is_a_site() -> None:
    found = [(site.name, site.role, site.slot) for site in sites(Layer())]
    linear = ["Linear.product", "Linear.gemm", "Linear.gather", "Linear.scatter"]
    assert found == [
        ("norm", "norm", "Norm.norm_residual"),
        ("attn", "attn", "Attention.core"),
        ("attn", "attn", "Attention.prepare_qk"),
        ("attn", "attn", "Attention.prepare_qkv"),
        *(("attn.qkv", "attn.qkv", slot) for slot in linear),
        *(("attn.out", "attn.out", slot) for slot in linear),
        ("mlp", "mlp", "MLP.activation"),
        ("mlp", "mlp", "MLP.core"),
        *(("mlp.up", "mlp.up", slot) for slot in linear),
        *(("mlp.down", "mlp.down", slot) for slot in ("Linear.activation_product", *linear)),
        ("dropout", "dropout", "Dropout.rows"),
    ]


def test_a_subclass_and_a_block_with_projections_of_its_own_have_the_slots_of_their_bases() -> None:
    assert [site.slot for site in sites(type("Scaled", (Loss,), {})())] == ["Loss.cross_entropy"]
    fused = nn.ModuleDict({"attn": DotProductAttention(2, 2, K, qk_norm=True, theta=None), "mlp": Activation("swiglu")})
    assert [site.slot for site in sites(fused)] == ["Attention.core", "Attention.prepare_qk", "MLP.activation"]
    assert {name for name, _ in fused.named_parameters()} == {"attn.q_norm", "attn.k_norm"}


def test_the_building_blocks_have_every_slot_that_plugins_can_name_and_no_other() -> None:
    blocks = [getattr(mplug_nn, name) for name in mplug_nn.__all__]
    own = {slot.name: slot for block in blocks for slot in getattr(block, "SLOTS", ())}
    assert own == SLOTS
    published = {entry.name: entry.target for entry in Registry().table("slots") if entry.distribution == "mplug-nn"}
    assert published == {name: slot.kind for name, slot in SLOTS.items()}, "nn/pyproject.toml, or its installed copy"


# Slots: applying.

CORE = "Attention.core"


def test_a_slot_that_nothing_declares_is_an_error_that_names_the_plugin_and_suggests_one() -> None:
    wrong = (Offer({"Attention.cor": print}, plugin="a/b"), Wrap("Attention.cor", print, 0, plugin="a/b"))
    for offered in wrong:
        with pytest.raises(UsageError, match=r"^a/b offers .*'Attention\.cor'.*mean 'Attention\.core'"):
            fill(toy(), [offered])


def recording(plugin: str, layer: int, slot: str, built: list[str]) -> Wrap:
    def around(inner: Callable[..., Any]) -> Callable[..., Any]:
        built.append(plugin)
        return lambda *args, **named: [plugin, *inner(*args, **named)]

    return Wrap(slot, around, layer, plugin=plugin)


def fill(model: Model, offers: list[Any], **kernels: str) -> None:
    model.place(Mesh.of([], 1), None)
    run: Any = SimpleNamespace(config=SimpleNamespace(kernels=Kernels(kernels, None)), entries=frozenset())
    fill_slots(model, select_offers(model, run, offers))


def test_a_role_shares_one_callable_whose_wraps_are_made_once_and_nothing_with_other_roles() -> None:
    model, built = toy(), list[str]()
    core = Offer({CORE: lambda *_: ["core"]}, plugin="kernels/fast")
    offers = [recording("outer", 2, CORE, built), recording("inner", 1, CORE, built), core]
    fill(model, offers, attention="kernels/fast")
    module: Any = model.module
    assert module.blocks["0"].attn.core is module.blocks["1"].attn.core
    assert module.blocks["0"].attn.core() == ["outer", "inner", "core"]
    assert built == ["inner", "outer"]
    model, built = toy(), list[str]()
    fill(model, [recording("parallel/tp", 0, "Linear.gather", built)])
    module: Any = model.module
    first, second = module.blocks["0"], module.blocks["1"]
    assert first.attn.qkv.gather is second.attn.qkv.gather
    assert first.attn.qkv.gather is not first.mlp.up.gather
    assert built == ["parallel/tp"] * 5  # qkv, out, up, down, project
    assert first.attn.qkv.scatter is first.attn.out.scatter  # untouched


def test_a_site_that_is_wrapped_otherwise_than_the_rest_of_its_role_has_its_own_callable() -> None:
    model, default = toy(), SLOTS[CORE].default
    first = recording("parallel/x", 0, CORE, [])
    fill(model, [replace(first, supports=lambda site, _: site.name == "blocks.0.attn")])
    module: Any = model.module
    assert module.blocks["1"].attn.core is default
    assert module.blocks["0"].attn.core is not default


def test_measuring_allocates_nothing_of_the_models_size() -> None:
    run = tiny_run({"model.hidden_size": 65536, "model.num_layers": 4, "model.vocab_size": 1000000})
    assert measure_bytes(run, build_model(run))["weights"] > 2**40


def test_the_gradient_of_an_embedding_that_two_stages_share_is_partial_over_the_stages() -> None:
    model = build_model(tiny_run({"parallel.layout": "pp2", "model.tie_embeddings": True}))
    partial = {name: one.partial_axes for name, one in model.placements.items() if one.partial_axes}
    assert partial == {"embedding.token.weight": ("pp",)}


def test_norms_of_queries_and_keys_get_gradients_from_every_head() -> None:
    model = build_model(tiny_run({"model.name": "qwen"}))
    found = model.plan.match(model.parameters())
    over = [found[f"blocks.0.attn.{name}"].over for name in ("q_norm", "k_norm")]
    assert over == [("batch", "sequence", "heads"), ("batch", "sequence", "kv_heads")]
