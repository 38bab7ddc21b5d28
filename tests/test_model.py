"""From a plan to memory: initial values, tied parameters, slots and bytes."""

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
    Site,
    Unit,
    UsageError,
    Wrap,
    contiguous,
    set_defaults,
)
from mplug.config.binding import Kernels
from mplug.config.defaults import default_settings
from mplug.config.sources import read_assignments
from mplug.layout.names import role_of
from mplug.model import memory as model_module
from mplug.model.build import build_model, measure_bytes
from mplug.model.memory import allocate, initialize
from mplug.model.slots.fill import fill_slots, select_offers, sites
from mplug.model.slots.selection import Selection, select
from mplug.model.units import run_units
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.assembly import build
from mplug_nn import MLP, SLOTS, Activation, Attention, DotProductAttention, Dropout, Embedding, Linear, Loss, Norm

V, D, K, FFN = 10, 6, 4, 8
HEADS, KV_HEADS = Segment("heads", 4, K), Segment("kv_heads", 2, K, "copy")
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


UP, VOCAB = (Segment("mlp", FFN), Segment("mlp", FFN)), Segment("vocab", V, uneven="pad")
PARAMETERS = {
    "table.weight": Parameter((VOCAB, "embed"), NORMAL),
    "blocks.*.norm.weight": Parameter(("embed",), ONES),
    "blocks.*.attn.qkv.weight": Parameter(((HEADS, KV_HEADS, KV_HEADS), "embed"), NORMAL),
    "blocks.*.attn.qkv.bias": Parameter(((HEADS, KV_HEADS, KV_HEADS),), Init("constant", value=0.25)),
    "blocks.*.attn.out.weight": Parameter(("embed", HEADS), Init("normal", std=0.1)),
    "blocks.*.attn.out.bias": Parameter(("embed",), Init("constant")),
    "blocks.*.mlp.up.weight": Parameter((UP, "embed"), NORMAL),
    "blocks.*.mlp.down.weight": Parameter(("embed", Segment("mlp", FFN)), NORMAL),
}
UNITS = tuple(Unit(name, (), ()) for name in ("table", "blocks.0", "blocks.1", "project"))


def toy(**changes: Parameter) -> Model:
    with torch.device("meta"):
        return Model(Toy(), Plan(UNITS, {**PARAMETERS, **changes}, {}, {}, Flops(0, 0)))


def mesh(tp: int, dp: int = 1) -> Mesh:
    axes = [Axis("tp", tp, splits=("heads", "kv_heads", "mlp", "vocab"))]
    return Mesh.of([*axes, Axis("dp", dp, entries={"batch": contiguous}, distance=9)], tp * dp)


def filled(on: Mesh, rank: int = 0, seed: int = 1) -> Model:
    model = toy()
    model.place(on, None)
    given_values(model, rank, seed)
    return model


def given_values(model: Model, rank: int, seed: int) -> None:
    allocate(model, rank, CPU, torch.float32, seed)
    initialize(model.parameters(), model.placements, rank, seed)


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


def test_the_cuts_are_those_that_the_plan_says() -> None:
    whole, second = values(filled(mesh(1))), values(filled(mesh(2), rank=1))
    qkv = "blocks.0.attn.qkv.weight"  # 4 heads and twice 2 KV heads of 4 rows
    assert torch.equal(second[qkv], torch.cat((whole[qkv][8:16], whole[qkv][20:24], whole[qkv][28:32])))
    up = "blocks.1.mlp.up.weight"
    assert torch.equal(second[up], torch.cat((whole[up][4:8], whole[up][12:16])))
    out = "blocks.1.attn.out.weight"
    assert torch.equal(second[out], whole[out][:, 8:])
    third = values(filled(mesh(4), rank=3))
    assert torch.equal(third["table.weight"], torch.cat((whole["table.weight"][9:], torch.zeros(2, D))))


def test_another_seed_gives_another_model_and_each_parameter_numbers_of_its_own() -> None:
    one, other = values(filled(mesh(1), seed=1)), values(filled(mesh(1), seed=2))
    assert not torch.equal(one["table.weight"], other["table.weight"])
    assert not torch.equal(one["blocks.0.mlp.up.weight"], one["blocks.1.mlp.up.weight"])
    assert torch.equal(one["blocks.0.norm.weight"], torch.ones(D))
    assert torch.equal(one["blocks.0.attn.qkv.bias"], torch.full((32,), 0.25))


@pytest.mark.parametrize(("rows", "columns"), [(200, 300), (300, 200)])
def test_initial_values_are_all_different_and_have_the_standard_deviation_of_the_plan(rows: int, columns: int) -> None:
    with torch.device("meta"):
        plan = Plan((Unit("0", (), ()),), {"0.weight": Parameter(("out", "in"), NORMAL)}, {}, {}, Flops(0, 0))
        model = Model(nn.Sequential(Linear(columns, rows, bias=False)), plan)
    model.place(Mesh.of([], 1), None)
    given_values(model, 0, 3)
    weight = model.parameters()["0.weight"].detach().double()
    assert float(weight.mean()) == pytest.approx(0, abs=5 * 0.5 / 60000**0.5)
    assert float(weight.std()) == pytest.approx(0.5, rel=5 / 120000**0.5)
    assert len(weight.unique()) > 59900  # of 60000 fp32 numbers a few agree by chance


def test_values_made_in_portions_are_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = values(filled(mesh(2), rank=1))
    monkeypatch.setattr(model_module, "CHUNK", 7)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in values(filled(mesh(2), rank=1)).items())


# Memory.


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


# Plans that do not fit their module.


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


# Units.


class Adder(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, 2 * x


def test_units_run_in_order_and_pass_values_on_by_their_names() -> None:
    module = nn.ModuleDict({"one": Adder(), "two": Adder()})
    units = (Unit("one", ("a", "b"), ("c",)), Unit("two", ("c",), ("c", "d"), method="both"))
    found = run_units(module, units, {"a": torch.tensor(1), "b": torch.tensor(2)})
    assert {name: int(value) for name, value in found.items()} == {"a": 1, "b": 2, "c": 3, "d": 6}


def test_a_unit_runs_as_a_module_so_that_what_hangs_on_it_runs_too() -> None:
    # Sharding and offloading libraries hang hooks on a module's call, and `Module.compile` replaces it.
    module, heard = nn.ModuleDict({"one": Adder()}), list[str]()
    module["one"].register_forward_pre_hook(lambda *_: heard.append("before"))
    module["one"].register_forward_hook(lambda *_: heard.append("after"))
    run_units(module, (Unit("one", ("a", "a"), ("c",)),), {"a": torch.tensor(1)})
    assert heard == ["before", "after"]


def test_a_unit_that_returns_another_number_of_outputs_is_an_error() -> None:
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


def test_a_subclass_has_the_slots_of_its_base_under_the_bases_name() -> None:
    class Scaled(Loss):
        pass

    assert [site.slot for site in sites(Scaled())] == ["Loss.cross_entropy"]


def test_a_block_with_projections_of_its_own_has_the_slots_of_attention_and_mlp() -> None:
    fused = nn.ModuleDict({"attn": DotProductAttention(2, 2, K, qk_norm=True, theta=None), "mlp": Activation("swiglu")})
    assert [site.slot for site in sites(fused)] == ["Attention.core", "Attention.prepare_qk", "MLP.activation"]
    assert {name for name, _ in fused.named_parameters()} == {"attn.q_norm", "attn.k_norm"}


def test_the_building_blocks_have_every_slot_that_plugins_can_name_and_no_other() -> None:
    blocks = [getattr(mplug_nn, name) for name in mplug_nn.__all__]
    own = {slot.name: slot for block in blocks for slot in getattr(block, "SLOTS", ())}
    assert own == SLOTS
    published = {entry.name: entry.target for entry in Registry().table("slots") if entry.distribution == "mplug-nn"}
    assert published == {name: slot.kind for name, slot in SLOTS.items()}, "nn/pyproject.toml, or its installed copy"


# Slots: selecting. Suppliers are told apart by what they return.


def supplier(*_: Any, **__: Any) -> str:
    return "supplied"


def answering(answer: bool | str) -> Callable[..., bool | str]:
    return lambda *_: answer


RUN: Any = None
ALWAYS = answering(True)
CORE, NORM, GEMM = "Attention.core", "Norm.norm_residual", "Linear.gemm"


class Everything:
    """A module with every slot of the building blocks, each with its default."""

    SLOTS = (*SLOTS.values(),)

    def __init__(self) -> None:
        set_defaults(self)


def site(slot: str, name: str = "blocks.0.part") -> Site:
    return Site(role_of(name), slot, Everything(), name)


def offer(plugin: str, *slots: str, supports: Any = ALWAYS) -> Offer:
    return Offer(dict.fromkeys(slots, supplier), supports, plugin=plugin)


def wrap(plugin: str, slot: str, layer: int = 0, needs: tuple[str, ...] = (), supports: Any = ALWAYS) -> Wrap:
    return Wrap(slot, lambda inner: inner, layer, frozenset(needs), supports, plugin)


def chosen(default: str | None = None, **kinds: str | None) -> Kernels:
    return Kernels(kinds, default)


def selected(there: list[Site], offers: list[Offer | Wrap], kernels: Kernels, run: Any) -> Selection:
    return select(there, offers, kernels, run, known=SLOTS)


def suppliers(selection: Selection) -> list[str]:
    return [filled.supplier for filled in selection.filled]


def test_a_slot_that_nothing_declares_is_an_error_that_names_the_plugin_and_suggests_one() -> None:
    for offered in (offer("kernels/fast", "Attention.cor"), wrap("parallel/cp", "Attention.cor")):
        with pytest.raises(UsageError, match=rf"^{offered.plugin} offers .*'Attention\.cor'.*mean 'Attention\.core'"):
            fill(toy(), chosen(), [offered])


def test_a_kernel_fills_the_kind_that_the_config_names_it_for_and_no_other() -> None:
    offers = [offer("kernels/fast", CORE), offer("kernels/fast", NORM), offer("kernels/other", CORE)]
    named = chosen(attention="kernels/fast", linear="kernels/other")
    selection = selected([site(CORE), site(NORM)], offers, named, RUN)
    assert suppliers(selection) == ["kernels/fast", "plain torch"]
    assert selection.unmet == []


def test_a_default_kernel_fills_every_slot_that_it_can_except_the_kinds_that_are_named() -> None:
    offers = [offer("kernels/fast", CORE), offer("kernels/all", CORE), offer("kernels/all", NORM)]
    there = [site(CORE), site(NORM), site(GEMM)]
    selection = selected(there, offers, chosen("kernels/all", attention="kernels/fast"), RUN)
    assert suppliers(selection) == ["kernels/fast", "kernels/all", "plain torch"]
    assert selection.unmet == []
    assert suppliers(selected(there, offers[1:], chosen("kernels/all", attention=None), RUN))[0] == "plain torch"


def test_a_kernel_that_is_named_and_fills_nothing_is_told() -> None:
    """It supplies a slot of the kind, and the model has only another of it."""
    wide, narrow = "Attention.prepare_qkv", "Attention.prepare_qk"
    for there, unmet in ([site(narrow)], 1), ([site(narrow), site(wide)], 0), ([site(CORE)], 0):
        selection = selected(there, [offer("kernels/fast", wide)], chosen(qk="kernels/fast"), RUN)
        assert len(selection.unmet) == unmet
    told = selected([site(narrow)], [offer("kernels/fast", wide)], chosen(qk="kernels/fast"), RUN).unmet
    assert str(told[0]) == (
        "kernels/fast cannot serve Attention.prepare_qk of 'blocks.*.part': it fills none of the slots of the kind "
        "'qk' that this model has"
    )


def test_an_offer_of_several_slots_fills_them_all_where_it_is_named_for_all() -> None:
    fused = offer("kernels/fused", NORM, GEMM)
    selection = selected([site(NORM), site(GEMM)], [fused], chosen(norm="kernels/fused", linear="kernels/fused"), RUN)
    assert suppliers(selection) == ["kernels/fused"] * 2
    assert all(filled.offer is fused for filled in selection.filled)


def test_an_offer_of_several_slots_fills_none_where_it_is_named_for_some_and_the_run_is_told() -> None:
    selection = selected(
        [site(NORM), site(GEMM)], [offer("kernels/fused", NORM, GEMM)], chosen(norm="kernels/fused"), RUN
    )
    assert suppliers(selection) == ["plain torch"] * 2
    assert [(unmet.kind, unmet.plugin) for unmet in selection.unmet] == [("norm", "kernels/fused")]


@pytest.mark.parametrize(
    ("one", "other", "kernels"),
    [
        ("kernels/fast", "parallel/tp", chosen(linear="kernels/fast")),
        ("parallel/tp", "parallel/acme", chosen()),
        ("kernels/fast", "kernels/fast", chosen(linear="kernels/fast")),
    ],
)
def test_two_suppliers_of_one_slot_are_refused_naming_both(one: str, other: str, kernels: Kernels) -> None:
    with pytest.raises(UsageError, match=f"{one} and {other}.*Linear.gemm.*blocks.*part"):
        selected([site(GEMM)], [offer(one, GEMM), offer(other, GEMM)], kernels, RUN)


def test_a_supplier_that_cannot_does_not_conflict() -> None:
    refusing = offer("kernels/fast", GEMM, supports=answering("it needs another chip"))
    selection = selected([site(GEMM)], [refusing, offer("parallel/tp", GEMM)], chosen(linear="kernels/fast"), RUN)
    assert suppliers(selection) == ["parallel/tp"]


def test_a_named_kernel_without_an_offer_of_the_kind_is_unmet() -> None:
    selection = selected([site(CORE)], [offer("kernels/fast", NORM)], chosen(attention="kernels/fast"), RUN)
    assert [(unmet.kind, unmet.plugin) for unmet in selection.unmet] == [("attention", "kernels/fast")]


def test_sites_that_are_none_of_a_suppliers_business_stay_in_plain_torch() -> None:
    only_first = offer("kernels/fast", CORE, supports=lambda site, _: site.name == "blocks.0.attn")
    there = [site(CORE, "blocks.0.attn"), site(CORE, "blocks.1.attn")]
    selection = selected(there, [only_first], chosen(attention="kernels/fast"), RUN)
    assert suppliers(selection) == ["kernels/fast", "plain torch"]
    assert selection.unmet == []


def test_wraps_are_ordered_by_layer_whoever_offers_them_first() -> None:
    offers = [
        wrap("parallel/b", CORE, 5),
        wrap("parallel/a", CORE, 9),
        wrap("parallel/c", CORE, -1),
        wrap("parallel/d", NORM),
    ]
    (filled,) = selected([site(CORE)], offers, chosen(), RUN).filled
    assert [wrap.plugin for wrap in filled.wraps] == ["parallel/c", "parallel/b", "parallel/a"]


def test_two_plugins_that_wrap_a_slot_at_one_layer_are_refused_naming_both() -> None:
    offers = [wrap("parallel/a", CORE, 5), wrap("parallel/b", CORE, 5)]
    with pytest.raises(UsageError, match=r"parallel/a and parallel/b both wrap Attention\.core of .* at layer 5"):
        selected([site(CORE)], offers, chosen(), RUN)
    assert len(selected([site(CORE)], [wrap("parallel/a", CORE, 5)] * 2, chosen(), RUN).filled[0].wraps) == 2


def test_what_wraps_need_is_asked_of_the_supplier() -> None:
    asked: list[frozenset[str]] = []

    def supports(site: Site, run: Any) -> bool | str:
        asked.append(site.needs)
        return "no log-sum-exp" if "lse" in site.needs else True

    offers = [wrap("parallel/cp", CORE, needs=("lse",)), wrap("parallel/x", CORE, 1, needs=("varlen",))]
    fast = replace(offer("kernels/fast", CORE, supports=supports), serves={"lse", "varlen"})
    selection = selected([site(CORE)], [*offers, fast], chosen(attention="kernels/fast"), RUN)
    assert asked == [frozenset({"lse", "varlen"})]
    assert [unmet.reason for unmet in selection.unmet] == ["no log-sum-exp"]


def test_plain_torch_does_not_offer_what_wraps_need_either() -> None:
    (unmet,) = selected([site(CORE)], [wrap("parallel/cp", CORE, needs=("lse",))], chosen(), RUN).unmet
    assert "lse" in str(unmet)


@pytest.mark.parametrize("number", [1, 3])
def test_a_wrap_that_does_not_apply_is_left_out_and_one_that_cannot_is_unmet(number: int) -> None:
    there = [site(CORE, f"blocks.{n}.attn") for n in range(number)]
    left_out = wrap("parallel/a", CORE, needs=("lse",), supports=answering(False))
    selection = selected(there, [left_out], chosen(), RUN)
    assert [filled.wraps for filled in selection.filled] == [()] * number
    assert selection.unmet == []
    refused = wrap("parallel/a", CORE, supports=answering("the sequence is odd"))
    assert {(unmet.plugin, unmet.reason) for unmet in selected(there, [refused], chosen(), RUN).unmet} == {
        ("parallel/a", "the sequence is odd")
    }


NARROW, WIDE = "Attention.prepare_qk", "Attention.prepare_qkv"


@pytest.mark.parametrize("lost", [wrap("parallel/x", NARROW), offer("parallel/x", NARROW)], ids=["wrap", "supplier"])
def test_what_a_strategy_puts_into_a_slot_is_not_lost_in_a_wider_one(lost: Offer | Wrap) -> None:
    there, fused = [site(NARROW), site(WIDE)], offer("kernels/fused", WIDE)
    with pytest.raises(UsageError, match=r"kernels/fused replaces .*prepare_qkv.*parallel/x.*set kernels\.qk=null"):
        selected(there, [lost, fused], chosen(qk="kernels/fused"), RUN)
    assert "kernels/fused" not in suppliers(selected(there, [lost, fused], chosen(attention="kernels/fused"), RUN))
    elsewhere = [site(NARROW, "blocks.1.attn"), site(WIDE, "blocks.0.attn")]
    assert "kernels/fused" in suppliers(selected(elsewhere, [lost, fused], chosen(qk="kernels/fused"), RUN))


def test_a_kernel_may_fill_a_slot_and_the_wider_one_around_it_and_the_default_one_yields() -> None:
    there, both = [site(NARROW), site(WIDE)], [offer("kernels/all", NARROW), offer("kernels/all", WIDE)]
    assert suppliers(selected(there, both, chosen("kernels/all"), RUN)) == ["kernels/all"] * 2
    fused = offer("parallel/x", WIDE)
    assert suppliers(selected(there, [both[0], fused], chosen("kernels/all"), RUN)) == ["kernels/all", "parallel/x"]


@pytest.mark.parametrize("slot", ["up.Linear.gemm", "up.Linear.scatter", "down.Linear.gather", "down.Linear.gemm"])
@pytest.mark.parametrize("put", [wrap, offer], ids=["wrap", "supplier"])
def test_what_is_put_into_a_part_of_a_module_is_not_lost_in_the_slot_around_it(
    put: Callable[..., Any], slot: str
) -> None:
    part, _, slot = slot.partition(".")
    there, fused = (
        [site("MLP.core", "blocks.0.mlp"), site(slot, f"blocks.0.mlp.{part}")],
        offer("kernels/f", "MLP.core"),
    )
    message = (
        rf"kernels/f replaces MLP\.core of .* as a whole, so the part that parallel/x puts into {slot} would never "
        rf"run; set kernels\.mlp"
    )
    with pytest.raises(UsageError, match=message):
        selected(there, [put("parallel/x", slot), fused], chosen(mlp="kernels/f"), RUN)


@pytest.mark.parametrize(
    "at", ["mlp.up Linear.gather", "mlp.down Linear.scatter", "attn.up Linear.gemm", "up Linear.gemm"]
)
def test_a_wider_slot_leaves_what_is_around_it_and_what_is_elsewhere(at: str) -> None:
    name, _, slot = at.partition(" ")
    there, fused = [site("MLP.core", "blocks.0.mlp"), site(slot, f"blocks.0.{name}")], offer("kernels/f", "MLP.core")
    selection = selected(there, [offer("parallel/x", slot), fused], chosen(mlp="kernels/f"), RUN)
    assert suppliers(selection) == ["kernels/f", "parallel/x"]


# Slots: applying.


def run_with(kernels: Kernels) -> Any:
    return SimpleNamespace(config=SimpleNamespace(kernels=kernels), entries=frozenset())


def recording(plugin: str, layer: int, slot: str, built: list[str]) -> Wrap:
    def around(inner: Callable[..., Any]) -> Callable[..., Any]:
        built.append(plugin)
        return lambda *args, **named: [plugin, *inner(*args, **named)]

    return Wrap(slot, around, layer, plugin=plugin)


def fill(model: Model, kernels: Kernels, offers: list[Any]) -> Selection:
    model.place(Mesh.of([], 1), None)
    selection = select_offers(model, run_with(kernels), offers)
    fill_slots(model, selection)
    return selection


def test_all_sites_of_a_role_share_one_callable_and_its_wraps_are_made_once() -> None:
    model, built = toy(), list[str]()
    core = Offer({CORE: lambda *_: ["core"]}, plugin="kernels/fast")
    offers = [recording("outer", 2, CORE, built), recording("inner", 1, CORE, built), core]
    fill(model, chosen(attention="kernels/fast"), offers)
    module: Any = model.module
    assert module.blocks["0"].attn.core is module.blocks["1"].attn.core
    assert module.blocks["0"].attn.core() == ["outer", "inner", "core"]
    assert built == ["inner", "outer"]


def test_roles_do_not_share_what_wraps_hold() -> None:
    model, built = toy(), list[str]()
    fill(model, chosen(), [recording("parallel/tp", 0, "Linear.gather", built)])
    module: Any = model.module
    first, second = module.blocks["0"], module.blocks["1"]
    assert first.attn.qkv.gather is second.attn.qkv.gather
    assert first.attn.qkv.gather is not first.mlp.up.gather
    assert built == ["parallel/tp"] * 5  # qkv, out, up, down, project
    assert first.attn.qkv.scatter is first.attn.out.scatter  # untouched


def test_a_site_that_is_wrapped_otherwise_than_the_rest_of_its_role_has_its_own_callable() -> None:
    model, built = toy(), list[str]()
    only_first = recording("parallel/x", 0, CORE, built)
    only_first = Wrap(CORE, only_first.wrap, 0, supports=lambda site, _: site.name == "blocks.0.attn", plugin="x")
    default = toy().module.blocks["0"].attn.core  # type: ignore[union-attr,operator]
    fill(model, chosen(), [only_first])
    module: Any = model.module
    assert module.blocks["1"].attn.core is default
    assert module.blocks["0"].attn.core is not default


# Bytes.

SHAPES = {
    "tied": ["model.tie_embeddings=true", "model.bias=true", "model.position=learned"],
    "untied": ["model.num_kv_heads=1", "model.qk_norm=true", "model.activation=swiglu"],
}


def small_run(*assignments: str) -> Run:
    small = ["model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "trainer.device=cpu"]
    settings = read_assignments([*small, "trainer.seq_length=16", *assignments])
    return prepare(resolve(Registry(), default_settings(), settings))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_bytes_that_explain_prints_are_the_storages_of_a_real_build(shape: str) -> None:
    run = small_run(*SHAPES[shape])
    parts = build(run)
    states = [tensor for piece in parts.pieces for tensor in parts.optimizer.state(piece).values()]
    real = {
        "weights": list(parts.model.module.parameters()),
        "gradients": [piece.gradient for piece in parts.pieces],
        "optimizer state": states,
    }
    other = small_run(*SHAPES[shape])
    measured = measure_bytes(other, build_model(other))
    storages = {what: {s.data_ptr(): s.nbytes() for s in map(Tensor.untyped_storage, real[what])} for what in real}
    assert measured == {what: sum(sizes.values()) for what, sizes in storages.items()}
    assert len({start for sizes in storages.values() for start in sizes}) == sum(map(len, storages.values()))
    assert len({t.data_ptr() for tensors in real.values() for t in tensors}) == sum(map(len, real.values()))
    numel = sum(parameter.numel() for parameter in parts.model.module.parameters())
    assert measured["weights"] == measured["gradients"] == 4 * numel


def test_measuring_allocates_nothing_of_the_models_size() -> None:
    run = small_run("model.hidden_size=65536", "model.num_layers=40", "model.vocab_size=1000000")
    assert measure_bytes(run, build_model(run))["weights"] > 2**42
