"""Norms and activations together with the product of their result: `acme-prologue` computes both."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from layout_words import COMPILED, RECOMPUTED, WHOLE_STREAM, under
from tiny_models import MIXTRAL
from torch import Tensor, nn

from mplug import Offer, Run, UsageError
from mplug.config.binding import Kernels
from mplug.model.build import build_model
from mplug.model.slots.declaration import fusibles, slot_of
from mplug.model.slots.fill import sites
from mplug.model.slots.selection import select
from mplug_nn import MLP, Attention, Boundary, Collective, DenseBlock, Linear, Norm, Projected
from mplug_nn.prologue import ACTIVATION_PRODUCT, FUSED_SLOTS, NORM_PRODUCT
from mplug_products.slot_buffers import hold
from mplug_testing import run_workers
from mplug_testing.delayed_gradient_checks import later_fault
from mplug_testing.harness import difference, tiny_run, train_steps
from mplug_testing.kernel_buffer_checks import BufferTrial
from mplug_testing.kernel_buffers import BufferChecks

Plant = Callable[..., None]
Settings = dict[str, Any]
NAMED: Settings = {"kernels.norm_product": "prologue", "kernels.activation_product": "prologue"}
GPT: Settings = {"model.num_layers": 2, "model.norm": "rmsnorm"}
B, S, D = 2, 6, 8
NORM = "Norm.norm_residual"


def block(**replaced: Any) -> DenseBlock:
    parts: dict[str, Any] = {
        "norm1": Norm(D, "layernorm", bias=True),
        "attn": Attention(D, 2, 2, 4, bias=True, qk_norm=False, theta=None),
        "norm2": Norm(D, "rmsnorm"),
        "mlp": MLP(D, 2 * D, "gelu", bias=True),
    }
    return DenseBlock(**{**parts, **replaced})


def fused_sites(module: nn.Module) -> dict[str, tuple[str, frozenset[str]]]:
    return {one.name: (one.slot, one.needs) for one in sites(module) if one.slot in FUSED_SLOTS}


# Where a model has the slots.


def test_a_block_states_its_norms_and_its_activation() -> None:
    with torch.device("meta"):
        own = block()
    norm, activation = FUSED_SLOTS
    assert fused_sites(own) == {
        "attn.qkv": (norm, frozenset(["layernorm"])),
        "mlp.up": (norm, frozenset(["rmsnorm"])),
        "mlp.down": (activation, frozenset(["gelu"])),
    }
    inner = {one.name: one.within for one in sites(own) if one.within}
    assert inner == {
        "norm1": {("attn.qkv", norm)},
        "norm2": {("mlp.up", norm)},
        "mlp": {("mlp.down", activation)},
    }


def test_a_norm_that_a_router_reads_too_is_not_fused() -> None:
    found = build_model(tiny_run(MIXTRAL)).slots
    assert {one.site.role for one in found if one.site.slot in FUSED_SLOTS} == {"blocks.*.attn.qkv"}


def overriding(kind: type[Any], method: str) -> Any:
    """A subclass that computes something else in one method."""
    return type(f"Other{kind.__name__}", (kind,), {method: lambda *_: None})


def adapted() -> DenseBlock:
    """The block with an addition to the product of a layer, as an adapter makes it."""
    own = block()
    own.attn.qkv.__class__ = overriding(Linear, "without_bias")
    return own


def other(method: str) -> DenseBlock:
    own = block()
    own.__class__ = overriding(DenseBlock, method)
    return own


ATTENTION = (D, 2, 2, 4), {"bias": True, "qk_norm": False, "theta": None}


@pytest.mark.parametrize(
    ("build", "remaining"),
    [
        (lambda: block(attn=overriding(Attention, "forward")(*ATTENTION[0], **ATTENTION[1])), {"mlp.up", "mlp.down"}),
        (lambda: block(mlp=overriding(MLP, "activate")(D, 2 * D, "gelu", bias=True)), {"attn.qkv", "mlp.up"}),
        (lambda: block(norm1=overriding(Norm, "forward")(D, "rmsnorm")), {"mlp.up", "mlp.down"}),
        (lambda: block(mlp=Linear(D, D)), {"attn.qkv"}),
        (adapted, {"mlp.up", "mlp.down"}),
        (lambda: block(attn=nn.Identity(), mlp=nn.Identity()), set()),
        (lambda: other("feed_forward"), {"attn.qkv", "mlp.down"}),
        (lambda: other("forward"), {"mlp.down"}),
    ],
    ids=["attention", "activation", "norm", "no MLP", "adapter", "modules", "feed-forward", "block"],
)
def test_a_statement_ends_where_a_subclass_overrides_the_code(
    build: Callable[[], nn.Module], remaining: set[str]
) -> None:
    """Otherwise a supplier would skip what the subclass computes."""
    with torch.device("meta"):
        assert set(fused_sites(build())) == remaining


def test_a_layer_takes_its_product_in_place_of_its_input() -> None:
    layer, y = Linear(D, 3), torch.randn(B, S, 3)
    nn.init.ones_(layer.bias)
    assert torch.equal(layer(Projected(y)), y + 1)
    assert not list(fusibles(layer))


def test_a_layer_with_a_fused_supplier_still_multiplies_an_input_by_its_own_product(plant: Plant) -> None:
    """Its copies of the weight and its collectives are those of the fused supplier."""
    plant("acme-prologue")
    from acme_prologue.products import Again

    layer, x = Linear(D, 3, bias=False), torch.randn(B, S, D)
    nn.init.normal_(layer.weight)
    expected = layer(x)
    calls: list[int] = []

    def gather(part: Tensor) -> Tensor:
        calls.append(1)
        return part

    collective = Collective(gather, boundary=Boundary(gather, lambda y: y, lambda x: x))
    layer.gather, layer.norm_product = collective, Again()
    layer.casts = (torch.zeros(D, 3),)
    torch.testing.assert_close(layer(x), expected)
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
@pytest.mark.wide("compile")
def test_a_compiled_block_without_gradients_computes_as_an_eager_one(plant: Plant) -> None:
    plant("acme-prologue")
    from acme_prologue.products import Again

    own = block().double()
    for parameter in own.parameters():
        nn.init.uniform_(parameter, -1, 1)
    for layer, slot in ((own.attn.qkv, "norm"), (own.mlp.up, "norm"), (own.mlp.down, "activation")):
        setattr(layer, f"{slot}_product", Again())
        hold(layer, slot_of(layer, f"Linear.{slot}_product"), {"largest": torch.zeros((), dtype=torch.float64)})
    inputs = torch.randn(B, S, D, dtype=torch.float64), torch.arange(S)[None], torch.arange(B)
    compiled = torch.compile(own, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), own(*inputs))


def test_the_suite_accepts_prologues_with_buffers(plant: Plant) -> None:
    plant("acme-prologue")
    from acme_prologue import Remembering

    for offer, slot in zip(Remembering(Remembering.Config()).offer(), FUSED_SLOTS, strict=True):
        assert later_fault(offer, slot, torch.float64, "cpu", compiles=False) == ""
        assert BufferTrial(offer, slot, torch.float64, "cpu", "here").fault(compiles=False) == ""


def test_the_suite_calls_a_supplier_with_a_prologue_that_it_computes(plant: Plant) -> None:
    plant("acme-prologue")
    from acme_prologue import Remembering
    from acme_prologue.products import Again

    class Gated(Again):
        def forward(self, given: Any, *others: Any) -> Any:
            assert given[0].kind == "swiglu"
            return super().forward(given, *others)

    offer: Offer = replace(
        Remembering(Remembering.Config()).offer()[1],
        suppliers={ACTIVATION_PRODUCT: Gated()},
        serves={"swiglu"},
    )

    class Checks(BufferChecks):
        plugin, compiles = "prologue", False

        def _offered(self, dtype: str | None = None) -> tuple[Run, list[Offer]]:
            return tiny_run({}), [offer]

    Checks().test_its_buffers_are_what_it_declares("fp32")
    Checks().test_weight_gradients_can_be_computed_later("fp32")


DENSE = [
    *("fsdp2", "zero2", "zero2 parallel.zero.stage=2", "pp2", "pp2 parallel.pp.schedule=gpipe", f"tp2 {WHOLE_STREAM}"),
    *(f"tp2 {COMPILED} {RECOMPUTED}", "tp2pp2", f"fsdp2tp2 {RECOMPUTED}"),
]
SWIGLU = {**GPT, "model.activation": "swiglu", "model.norm": "layernorm"}
OTHERS = [(DENSE, GPT), (["tp2cp2"], SWIGLU), (["ep2", "tp2ep2"], MIXTRAL)]
CASES = [pytest.param(one, model, marks=pytest.mark.wide("layouts")) for some, model in OTHERS for one in some]


@pytest.mark.parametrize(("layout", "model"), [("tp2", GPT), *CASES])
def test_a_run_equals_that_of_one_process_in_plain_torch(plant: Plant, layout: str, model: Settings) -> None:
    plant("acme-prologue")
    named = {"kernels.norm_product": "prologue"} if model is MIXTRAL else NAMED
    ranks, settings = under({**model, **named}, layout)
    assert difference(run_workers(ranks, steps, settings), run_workers(1, train_steps, model)[0]) == ""


def steps(settings: Settings) -> Any:
    warnings.simplefilter("ignore")  # torch's own, as it traces
    return train_steps(settings)


def test_a_norm_of_another_plugin_that_would_never_run_is_refused(plant: Plant) -> None:
    plant("acme-prologue")
    with pytest.raises(UsageError, match=r"kernels/reference puts into Norm\.norm_residual would never"):
        build_model(tiny_run({**GPT, **NAMED, "kernels.norm": "reference"}))
    model = build_model(tiny_run({**GPT, **NAMED, "kernels.default": "reference"}))
    filled = {one.site.role: one.supplier for one in model.slots if one.site.slot == NORM_PRODUCT}
    assert filled == {"blocks.*.attn.qkv": "kernels/prologue", "blocks.*.mlp.up": "kernels/prologue"}


def test_the_supplier_of_a_whole_mlp_replaces_the_default_kernels_fusions_and_the_norm_runs() -> None:
    with torch.device("meta"):
        own = block()
    serves = {"layernorm", "rmsnorm", "gelu"}
    slots = (*FUSED_SLOTS, NORM)
    everywhere = {slot: Offer({slot: object()}, serves=serves, plugin="kernels/all") for slot in slots}
    core = Offer({"MLP.core": object()}, plugin="kernels/whole")

    def suppliers(kinds: dict[str, str | None], default: str | None) -> dict[tuple[str, str], str]:
        found = select(sites(own), [*everywhere.values(), core], Kernels(kinds, default), None)  # type: ignore[arg-type]
        assert found.unmet == []
        return {(one.site.name, one.site.slot): one.supplier for one in found.filled}

    found = suppliers({"mlp": "kernels/whole"}, "kernels/all")
    assert found["attn.qkv", NORM_PRODUCT] == found["norm2", NORM] == "kernels/all"
    assert found["mlp.up", NORM_PRODUCT] == found["mlp.down", ACTIVATION_PRODUCT] == "plain torch"
    named = dict.fromkeys(("norm_product", "activation_product"), "kernels/all")
    with pytest.raises(UsageError, match=r"kernels/all puts into Linear\.norm_product would never run"):
        suppliers({"mlp": "kernels/whole", **named}, None)


def test_a_kind_of_norm_that_a_supplier_does_not_know_is_refused(plant: Plant) -> None:
    plant("acme-prologue", '"rmsnorm", "gelu"', '"gelu"')
    with pytest.raises(UsageError, match=r"cannot serve Linear\.norm_product of .*: it does not offer rmsnorm"):
        build_model(tiny_run({**GPT, **NAMED}))


def test_a_model_without_such_an_activation_is_refused(plant: Plant) -> None:
    plant("acme-prologue")
    with pytest.raises(UsageError, match=r"kernels\.activation_product=prologue: the model has no activation"):
        build_model(tiny_run({**MIXTRAL, **NAMED}))
