"""The precision and its products: training near fp64 and under layouts, boundaries, and what they refuse."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from mplug_fp8 import FP8, FP8Products, limits
from mplug_fp8.products import Delayed, Rowwise, Tensorwise
from mplug_fp8.recipes import Options
from mplug_fp8.scaled import Products
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mplug import Axis, Mesh, Offer, Recipe, Run, Site, UsageError
from mplug.config.sources import read_assignments
from mplug.layout.plan import Init, Parameter
from mplug.model.build import build_model
from mplug_nn import Boundary, Experts, Linear, Narrow, Operand
from mplug_nn.prologue import FUSED_SLOTS
from mplug_saving.folder import newest
from mplug_testing import KernelSuite, PrecisionSuite, kernel_cases, run_workers, runs
from mplug_testing.harness import Trace, difference, tiny_config, tiny_run, train_ranks, train_steps

NAMED: dict[str, Any] = {"kernels.linear": "fp8", "model.num_layers": 3}
DELAYED = {"precisions.fp8.when": "delayed", "precisions.fp8.history": 2, "precisions.fp8.power_of_two": True}
BLOCKS_OF_128 = {"model.hidden_size": 256, "model.num_attention_heads": 4, "model.num_kv_heads": 2}
FUSED = {**DELAYED, "kernels.norm_product": "fp8", "kernels.activation_product": "fp8"}
SEPARATE: dict[str, Any] = {"kernels.norm_product": None, "kernels.activation_product": None}
RECIPES: dict[str, dict[str, Any]] = {
    "tensorwise": {},
    "delayed": DELAYED,
    "fused": FUSED,
    "rowwise": {"precisions.fp8.scaling": "rowwise"},
    "blockwise": {**BLOCKS_OF_128, "precisions.fp8.scaling": "blockwise"},
}
SAME, ROUNDED = 1e-5, 0.4
BANDS = {
    "dp2": SAME,
    "zero2": SAME,
    "zero2 parallel.zero.stage=2": SAME,
    "pp2": SAME,
    "tp2": ROUNDED,
    "tp2 parallel.tp.sequence_parallel=false": ROUNDED,
    "fsdp2": ROUNDED,
}
"""Maximum relative errors of gradients under a layout. dp, zero and pp quantise the numbers of one process, and sum
the same gradients. tp and fsdp round bf16 numbers or sums in another way, as they do in bf16 (errors of 0.02 to 0.04
here); where an fp8 number then rounds to the other side, it differs by 6%."""


@pytest.mark.wide("precision")
class TestDelayedProducts(KernelSuite):
    """Linear layers: torch's grouped product has no scales for experts but those of rows."""

    plugin = "fp8"
    settings: ClassVar = DELAYED
    dtypes = ("fp8",)
    error_factor = 64.0  # fp8 numbers have four bits of significand less than those of bf16

    @classmethod
    def naming(cls) -> dict[str, Any]:
        return {**super().naming(), "trainer.precision": "fp8"}

    @pytest.fixture(autouse=True)
    def without_sinks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A sink in fp32 has no rounding to compare with; test_quantisation.py checks it."""
        cases = [case for case in kernel_cases.cases() if "sink" not in case.name]
        monkeypatch.setattr(kernel_cases, "cases", lambda: cases)

    def _offered(self, dtype: str | None = None) -> tuple[Run, list[Offer]]:
        run, offers = super()._offered(dtype)
        return run, [offer for offer in offers if "Experts.product" not in offer.suppliers]


class TestTensorwiseProducts(TestDelayedProducts):
    settings: ClassVar = RECIPES["tensorwise"]


class TestRowwiseProducts(TestDelayedProducts):
    settings: ClassVar = RECIPES["rowwise"]

    def _offered(self, dtype: str | None = None) -> tuple[Run, list[Offer]]:
        return KernelSuite._offered(self, dtype)


@pytest.mark.wide("precision", tests=["test_a_layout_gives_the_run_of_one_process"])
class TestFused(PrecisionSuite):
    """Norms and activations together with the product after them, by delayed scaling."""

    plugin = "fp8"
    settings: ClassVar = {**NAMED, **FUSED}
    layouts = ("tp2",)
    tolerance = ROUNDED
    beside: ClassVar = {"scaling": {**SEPARATE, "precisions.fp8.when": "current"}, "when": SEPARATE}
    without_effect: ClassVar = {
        "history": "it counts steps, and the tiny run has two (tests/test_delayed_scaling.py looks at five)"
    }


@pytest.mark.wide("precision")
class TestDelayed(TestFused):
    checks_fields = False
    settings: ClassVar = {**NAMED, **DELAYED}


@pytest.mark.wide("precision")
class TestTensorwise(PrecisionSuite):
    plugin = "fp8"
    checks_fields = False
    settings: ClassVar = NAMED
    tolerance = ROUNDED


@pytest.mark.wide("precision")
class TestRowwise(TestTensorwise):
    settings: ClassVar = {**NAMED, **RECIPES["rowwise"]}


@pytest.mark.wide("precision")
class TestBlockwise(TestTensorwise):
    settings: ClassVar = {**NAMED, **RECIPES["blockwise"]}


@pytest.mark.wide("precision")
class TestExperts(TestTensorwise):
    settings: ClassVar = {
        **NAMED,
        **RECIPES["rowwise"],
        "kernels.experts": "fp8",
        "model.name": "mixtral",
        "model.hidden_size": 32,
        "model.num_attention_heads": 4,
        "model.num_kv_heads": 2,
        "model.vocab_size": 259,
        "model.ffn_hidden_size": 32,
        "model.num_experts": 4,
        "model.init_std": 0.06,
    }
    layouts = ("dp2", "ep2", "fsdp2")


RUN = {**NAMED, "trainer.precision": "fp8", "model.num_layers": 4}


@cache
def one_process(recipe: str) -> Trace:
    return train_steps({**RUN, **RECIPES[recipe]})


@pytest.mark.wide("precision")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", BANDS)
def test_a_layout_is_within_its_band_of_one_process(layout: str, recipe: str) -> None:
    word, *more = layout.split()
    settings = {".".join(key): setting.value for key, setting in read_assignments(more).items()}
    ranks = train_ranks(2, {**RUN, **RECIPES[recipe], "parallel.layout": word, **settings})
    alone = one_process(recipe)
    assert difference(ranks, alone, BANDS[layout]) == ""
    assert ranks[0].losses == pytest.approx(alone.losses, rel=5e-3)
    assert ranks[0].norms == pytest.approx(alone.norms, rel=2e-2)


@pytest.mark.wide("precision")
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_recomputed_blocks_give_the_same_bits_and_histories(recipe: str) -> None:
    again = train_steps({**RUN, **RECIPES[recipe], "memory.recompute.mode": "full"})
    assert difference([again], one_process(recipe), 0.0) == ""


def trained(settings: dict[str, Any], steps: int, directory: Path, resume_from: Path | None = None) -> list[float]:
    more = {"trainer.eval_every": 0, "checkpoint.asynchronous": False, "trainer.steps": steps}
    return runs.trained(tiny_config({**RUN, **DELAYED, **more, **settings}), directory, resume_from=resume_from).losses


@pytest.mark.wide("precision")
def test_histories_of_scales_resume_under_another_layout(tmp_path: Path) -> None:
    (whole,) = run_workers(1, trained, {}, 4, tmp_path / "whole")
    run_workers(2, trained, {"parallel.layout": "zero2"}, 2, tmp_path / "begun")
    begun = newest(tmp_path / "begun" / "checkpoints")
    for layout, band in (("pp2", SAME), ("tp2", 5e-3)):
        losses = run_workers(2, trained, {"parallel.layout": layout}, 4, tmp_path / layout, begun)[0]
        assert losses == pytest.approx(whole[2:], rel=band, abs=0), layout


# Boundaries: two ranks with the same data, so that a gather repeats its part.


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def delayed_buffers() -> dict[str, Tensor]:
    found = {name: torch.zeros(()) for name in ("input", "gradient")}
    return {**found, "input_scale": torch.full((1,), 16.0), "gradient_scale": torch.full((1,), 256.0)}


@pytest.mark.parametrize("kind", [Tensorwise, Delayed, Rowwise])
def test_tensorwise_products_gather_fp8_numbers_with_a_common_scale(kind: type[Products]) -> None:
    gathered: list[torch.dtype] = []
    asked: list[Tensor] = []

    def whole(part: Tensor) -> Tensor:
        gathered.append(part.dtype)
        return torch.cat([part, part], dim=-2)

    def largest(x: Tensor) -> Tensor:
        asked.append(x)
        return x * 4  # another rank has larger values

    boundary = Boundary(whole, lambda x: x[..., : x.shape[-2] // 2, :], largest)
    supplier, weight = kind(Options(power_of_two=True)), drawn(48, 32)
    x, grad_y = drawn(2, 5, 32, seed=1), drawn(2, 10, 48, seed=2)
    operand = Operand(weight, supplier.cast(weight, {}))
    results = []
    for before, part in ((boundary, x), (None, torch.cat([x, x], dim=-2))):
        narrow = Narrow(before=before)
        y, saved = supplier.forward(part, operand, narrow, delayed_buffers())
        grads: tuple[Any, Any] = supplier.backward(grad_y, operand, saved, None, narrow, delayed_buffers(), True)
        results.append((y, grads[0] if before else grads[0][..., :5, :], grads[1]))
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours, right, rtol=0.02, atol=0.02)  # powers of two: only small numbers differ
    assert set(gathered) == {torch.bfloat16 if kind is Rowwise else torch.float8_e4m3fn}
    assert len(asked) == (kind is Tensorwise)
    narrow, part = Narrow(after=boundary), grad_y[:, :5]
    gathered.clear()
    _, saved = supplier.forward(torch.cat([x, x], dim=-2), operand, narrow, delayed_buffers())
    grad_x, _ = supplier.backward(part, operand, saved, None, narrow, delayed_buffers(), True)
    assert grad_x is not None
    assert grad_x.shape == (2, 10, 32)
    assert set(gathered) == {torch.bfloat16 if kind is Rowwise else torch.float8_e5m2}


def test_a_common_scale_is_that_of_the_largest_rank() -> None:
    boundary = Boundary(lambda part: part, lambda x: x, lambda x: x * 4)
    supplier, x = Tensorwise(Options(power_of_two=True)), drawn(16, 32)
    alone, common = (
        supplier.quantised(x, supplier.measured(x, around), "input", {}).rows for around in (None, boundary)
    )
    assert float(common.inverse) == 4 * float(alone.inverse)


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
