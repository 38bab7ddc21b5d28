"""What the kernel fp8 serves, what it refuses with which reason, and what it saves for backward."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fp8_recipes import NAMED, RECIPES
from mplug_fp8 import FP8, FP8Products, limits
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mplug import Axis, Mesh, Recipe, Site, UsageError
from mplug.layout.plan import Init, Parameter
from mplug.model.build import build_model
from mplug_nn import Experts, Linear
from mplug_nn.prologue import FUSED_SLOTS
from mplug_testing.harness import tiny_run, train_steps

# What it refuses.


def answer(
    module: nn.Module | None = None,
    scaling: Any = "tensorwise",
    device: str = "cpu",
    tp: int = 1,
    needs: tuple[str, ...] = (),
    recipe: Recipe | None = None,
    activations: str = "bfloat16",
    slot: str = "Linear.product",
) -> bool | str:
    """The answer for a slot of a linear layer [64, 32], or for another module."""
    with torch.device("meta"):
        module = module or Linear(32, 64)
    recipe = recipe or FP8(FP8.Config(scaling=scaling)).define_precision().recipe
    assert recipe is not None
    precision = SimpleNamespace(recipe=recipe, activations=activations)
    mesh = Mesh.of([Axis("tp", tp, splits=("mlp",))], tp)
    kernels = SimpleNamespace(kinds={slot.rpartition(".")[2]: "kernels/fp8"} if slot in FUSED_SLOTS else {})
    config = SimpleNamespace(kernels=kernels)
    run: Any = SimpleNamespace(device=device, precision=precision, mesh=mesh, config=config)
    weights = ("up", "down") if isinstance(module, Experts) else ("weight",)
    slot = "Experts.product" if isinstance(module, Experts) else slot
    dims = ("experts", "mlp", "embed") if isinstance(module, Experts) else ("mlp", "embed")
    described = {name: Parameter(dims, Init("normal")) for name in weights}
    site = Site("blocks.*.up", slot, module, "blocks.0.up", frozenset({recipe.need, *needs}), described)
    offers = [one for one in FP8Products(FP8Products.Config()).offer(run) if slot in one.suppliers]
    answers = {offer.answer(site, run) for offer in offers} - {False}
    assert len(answers) < 2
    return answers.pop() if answers else False


NORM, ACTIVATION = FUSED_SLOTS
DELAYED_RECIPE = FP8(FP8.Config(when="delayed")).define_precision().recipe
with torch.device("meta"):
    EXPERTS, ODD, WIDE = Experts(32, 64, 4, "gelu"), Linear(40, 64), Linear(128, 256)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"scaling": "rowwise"},
        {"module": EXPERTS, "scaling": "rowwise"},
        {"slot": NORM, "needs": ("rmsnorm",), "recipe": DELAYED_RECIPE},
        {"slot": ACTIVATION, "needs": ("swiglu",), "recipe": DELAYED_RECIPE},
    ],
)
def test_it_serves_its_recipes(asked: dict[str, Any]) -> None:
    assert answer(**asked) is True


FAST = Recipe("fp8-tensorwise", {"forward": "float8_e4m3fn", "fast": 1})
TO_E5M2 = Recipe("fp8-rowwise", {"gradient": "float8_e5m2"})


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"module": EXPERTS}, "only with a scale for each row ('fp8-rowwise')"),
        ({"module": ODD}, "multiples of 16, and this site's weight is 64 by 40"),
        ({"scaling": "blockwise"}, "multiples of 128, and this site's weight is 64 by 32"),
        ({"tp": 8}, "64 by 32, of which a rank has 8 by 32"),
        ({"needs": ("log-sum-exp",)}, "it does not offer log-sum-exp"),
        ({"recipe": Recipe("fp4", {"bits": 4})}, "it computes the recipes fp8-tensorwise, fp8-delayed"),
        ({"recipe": FAST}, "does not know an option"),
        ({"recipe": TO_E5M2}, "with gradients in float8_e4m3fn"),
        ({"activations": "float32"}, "computes in float32"),
        ({"device": "mps"}, "needs a CUDA GPU or a CPU"),
        ({"slot": NORM, "needs": ("rmsnorm",)}, "set precisions.fp8.when=delayed, or kernels.norm_product=null"),
        ({"slot": NORM, "needs": ("groupnorm",), "recipe": DELAYED_RECIPE}, "it does not offer groupnorm"),
        ({"slot": ACTIVATION, "needs": ("relu",), "recipe": DELAYED_RECIPE}, "it does not offer relu"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(asked: dict[str, Any], reason: str) -> None:
    assert reason in str(answer(**asked))


@pytest.mark.parametrize(
    ("chip", "cuda", "triton", "scaling", "reason"),
    [
        ((9, 0), "13.0", True, "blockwise", ""),
        ((9, 0), "12.9", True, "blockwise", ""),
        ((9, 0), "12.8", True, "blockwise", "with CUDA 12.9 or newer, and this torch has 12.8"),
        ((10, 0), "13.0", True, "blockwise", "on GPUs of compute capability 9.0, and this GPU has 10.0"),
        ((8, 9), "13.0", True, "tensorwise", ""),
        ((8, 9), "13.0", False, "tensorwise", "needs Triton"),
        ((8, 0), "13.0", True, "tensorwise", "needs compute capability 8.9, and this GPU has 8.0"),
        ((8, 9), "13.0", True, "rowwise", "needs compute capability 9.0, and this GPU has 8.9"),
    ],
)
def test_it_names_the_chip_and_the_software_that_a_recipe_needs(
    chip: tuple[int, int], cuda: str, triton: bool, scaling: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: chip)
    monkeypatch.setattr(limits, "triton_builds", lambda: triton)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = answer(WIDE, scaling, "cuda")
    assert reason in str(found) if reason else found is True


def test_it_fills_products_outside_of_base_modules_and_saves_inputs_in_fp8_unless_backward_has_them_in_bf16() -> None:
    run = tiny_run({**NAMED, "trainer.precision": "fp8"})
    filled = build_model(run).slots
    own = [one for one in filled if one.supplier == "kernels/fp8"]
    keeps = {one.site.name: one.offer.suppliers["Linear.product"].keeps_input for one in own if one.offer is not None}
    assert keeps == {
        "blocks.1.attn.qkv": False,
        "blocks.1.attn.out": True,
        "blocks.1.mlp.up": False,
        "blocks.1.mlp.down": True,
    }
    assert own[0].supplier_label(run) == "kernels/fp8 (emulated on a CPU)"
    site = next(one.site for one in filled if one.site.slot == "Linear.product")
    assert limits.supports_linear(site, tiny_run({"trainer.precision": "bf16"})) is False


def test_a_named_kernel_without_a_recipe_is_refused_with_the_precision_to_add() -> None:
    with pytest.raises(UsageError, match=r"trainer\.precision=fp32 has none; add --precision fp8, or remove kernels\."):
        build_model(tiny_run({"kernels.linear": "fp8"}))


def saved_bytes(settings: dict[str, Any]) -> int:
    """Bytes of all tensors that autograd keeps in a short compiled run, each storage once."""
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        train_steps({"model.num_layers": 3, "trainer.compile": "aot_eager", **settings})
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in kept}.values())


@pytest.mark.wide("precision")
@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_a_compiled_run_keeps_less_for_backward_than_in_bf16(recipe: str) -> None:
    in_bf16 = saved_bytes({"trainer.precision": "bf16"})
    assert saved_bytes({**NAMED, "trainer.precision": "fp8", **RECIPES[recipe]}) < in_bf16


@pytest.mark.parametrize(
    ("fields", "name", "options"),
    [
        ({}, "fp8-tensorwise", {"power_of_two": False}),
        ({"when": "delayed", "history": 16, "margin": 1}, "fp8-delayed", {"history": 16, "margin": 1}),
        ({"scaling": "rowwise"}, "fp8-rowwise", {"power_of_two": True}),
        ({"scaling": "blockwise"}, "fp8-blockwise", {"power_of_two": True}),
    ],
)
def test_the_recipe_is_data_for_any_supplier(fields: dict[str, Any], name: str, options: dict[str, Any]) -> None:
    recipe = FP8(FP8.Config(**fields)).define_precision().recipe
    assert recipe is not None
    assert recipe.name == name
    assert {**recipe.options, **options} == recipe.options
    if name == "fp8-delayed":
        formats = {"forward": "float8_e4m3fn", "gradient": "float8_e5m2", "power_of_two": False}
        assert recipe.options == {**formats, **options}
