"""What the plugin claims and refuses. Its numbers are in the other files: by stand-ins, and on a GPU."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mplug_te.attention
import mplug_te.library
import pytest
import torch
from mplug_te import FP8, TransformerEngine
from mplug_te.fused import Mask
from mplug_te.recipes import BLACKWELL, BLOCKWISE, DELAYED, TENSORWISE

from mplug import Offer, Precision, Recipe, Site
from mplug.layout.plan import Init, Parameter
from mplug.model.slots.offers import Filled
from mplug_nn import DelayedScaling, DotProductAttention, Experts, Linear, Norm
from mplug_nn.specification import DOCUMENTS, LOG_SUM_EXP
from mplug_testing import precision_named

INSTALLED = "2.20.2"


def machine(
    monkeypatch: pytest.MonkeyPatch,
    installed: str = INSTALLED,
    capability: tuple[int, int] = (9, 0),
    cuda: str = "13.0",
    broken: str = "",
    cudnn: str = "",
) -> None:
    """Makes the machine one with such a GPU and Transformer Engine; `cudnn`: its reason against attention."""

    def version(name: str) -> str:
        if not installed:
            raise mplug_te.library.PackageNotFoundError(name)
        return installed

    def library() -> Any:
        if broken:
            raise ImportError(broken)
        return SimpleNamespace(tex=SimpleNamespace(get_cudnn_version=lambda: 91900))

    mplug_te.library._broken.cache_clear()
    monkeypatch.setattr(mplug_te.library, "version", version)
    monkeypatch.setattr(mplug_te.library, "library", library)
    monkeypatch.setattr(mplug_te.attention, "library", library)
    monkeypatch.setattr(mplug_te.attention, "_message", lambda *_: cudnn)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr("torch.version.cuda", cuda)


def run(
    precision: Precision | None = None, device: str = "cuda", tp: int = 1, named: tuple[str, ...] = (), **trainer: Any
) -> Any:
    """A run that names this plugin for some kinds of slots."""
    chosen = precision_named("bf16") if precision is None else precision
    values = {"precision": "word", "deterministic": False, "seq_length": 256, "micro_batch_size": 2, **trainer}
    kernels = SimpleNamespace(kinds=dict.fromkeys(named, "kernels/te"))
    config = SimpleNamespace(trainer=SimpleNamespace(**values), kernels=kernels)
    mesh = SimpleNamespace(axes={"tp": SimpleNamespace(size=tp, splits=("mlp",))})
    return SimpleNamespace(device=device, precision=chosen, config=config, mesh=mesh)


def fp8(recipe: str = "delayed", **options: Any) -> Precision:
    return FP8(FP8.Config(recipe=recipe, **options)).define_precision()  # type: ignore[arg-type]


def linear(inputs: int = 256, outputs: int = 128, needs: tuple[str, ...] = ()) -> Site:
    with torch.device("meta"):
        layer = Linear(inputs, outputs, bias=False)
    weight = {"weight": Parameter(("mlp", "embed"), Init("normal"))}
    return Site("blocks.*.mlp.up", "Linear.product", layer, "blocks.0.mlp.up", frozenset(needs), weight)


def experts(recipe: str, inputs: int = 256, outputs: int = 128) -> Site:
    """Those of a run by a recipe, or in bf16 ('')."""
    with torch.device("meta"):
        module = Experts(inputs, outputs, 4, "gelu")
    dims = {"up": ("expert", "mlp", "embed"), "down": ("expert", "embed", "mlp")}
    entries = {name: Parameter(axes, Init("normal")) for name, axes in dims.items()}
    needs = frozenset({Recipe(recipe).need} if recipe else ())
    return Site("blocks.*.moe.experts", "Experts.product", module, "blocks.0.moe.experts", needs, entries)


def fused(prologue: str, kind: str, recipe: str = DELAYED) -> Site:
    needs = (kind, *((Recipe(recipe).need,) if recipe else ()))
    return replace(linear(needs=needs), slot=f"Linear.{prologue}_product")


def attention(*needs: str, **named: Any) -> Site:
    with torch.device("meta"):
        module = DotProductAttention(4, 2, 64, qk_norm=False, theta=None, **named)
    return Site("blocks.*.attn", "Attention.core", module, "blocks.0.attn", frozenset(needs))


def answers(site: Site, during: Any) -> list[bool | str]:
    found: list[Offer] = TransformerEngine(TransformerEngine.Config()).offer(during)
    return [answer for one in found if site.slot in one.suppliers and (answer := one.answer(site, during)) is not False]


# What it serves.

NAMED = ("experts", "norm_product", "activation_product")
FP8_RECIPES = ("delayed", "tensorwise", "blockwise")
SOFT_CAP = attention("soft cap", soft_cap=2.0)
SINKS = attention("attention sinks", sinks=True)
with torch.device("meta"):
    NORM = Site("norm", "Norm.norm_residual", Norm(24, "rmsnorm"), "norm")


def by(name: str) -> Site:
    return linear(needs=(Recipe(name).need,))


@pytest.mark.parametrize(
    ("site", "during"),
    [
        *((by(f"fp8-{recipe}"), run(fp8(recipe))) for recipe in FP8_RECIPES),
        *((layer, run(fp8(recipe))) for layer in (linear(), linear(33, 7)) for recipe in FP8_RECIPES),
        (linear(128, 96, (Recipe(DELAYED).need,)), run(fp8(), tp=2)),
        *((experts(f"fp8-{recipe}"), run(fp8(recipe), named=NAMED)) for recipe in FP8_RECIPES),
        *((experts(""), run(fp8(recipe), named=NAMED)) for recipe in FP8_RECIPES),
        (experts(""), run(named=NAMED)),
        *(
            (fused("activation", kind), run(fp8(), named=NAMED))
            for kind in ("swiglu", "gelu_tanh", "geglu_tanh", "relu2")
        ),
        (fused("norm", "rmsnorm"), run(fp8())),
        (NORM, run()),
        (attention(), run()),
        (attention("window", DOCUMENTS, window=9), run()),
        (attention(LOG_SUM_EXP), run()),
    ],
)
def test_it_serves_the_recipe_of_the_run_and_base_modules_in_bf16(
    monkeypatch: pytest.MonkeyPatch, site: Site, during: Any
) -> None:
    machine(monkeypatch)
    assert answers(site, during) == [True]


def test_experts_and_fused_activations_are_offered_only_if_the_config_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch)
    unnamed = [(experts(f"fp8-{recipe}"), run(fp8(recipe))) for recipe in FP8_RECIPES]
    for site, during in (*unnamed, (experts(""), run()), (fused("activation", "swiglu"), run(fp8()))):
        assert answers(site, during) == []


def test_the_buffers_of_delayed_scaling_have_the_history_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    offers = TransformerEngine(TransformerEngine.Config()).offer(run(fp8("delayed", history=7)))
    declared, of_norms = [found for one in offers if (found := one.buffers(linear()))]
    assert declared == of_norms == DelayedScaling({"input": 448.0, "gradient": 57344.0}, steps=7).buffers(linear())


@pytest.mark.parametrize(
    ("mask", "word", "span"),
    [
        (Mask(True, 0, False, False, False), "causal", (-1, 0)),
        (Mask(False, 0, False, False, False), "no_mask", (-1, -1)),
        (Mask(True, 5, False, False, False), "causal", (4, 0)),
        (Mask(False, 5, False, False, False), "no_mask", (4, 4)),
        (Mask(True, 0, True, False, False), "causal_bottom_right", (-1, 0)),
        (Mask(True, 0, False, True, False), "padding_causal", (-1, 0)),
        (Mask(False, 0, False, True, False), "padding", (-1, -1)),
    ],
)
def test_masks_have_transformer_engines_words_and_inclusive_spans(mask: Mask, word: str, span: tuple[int, int]) -> None:
    assert (mask.word, mask.span) == (word, span)


def test_a_cuda_graph_replays_the_products_that_a_gpu_has_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)

    def answer(precision: Precision, *filled: Site) -> bool | str:
        during, plugin = run(precision, named=NAMED), TransformerEngine(TransformerEngine.Config())
        during.hooks = SimpleNamespace(plugins={"kernels/te": plugin})
        slots = []
        for at in filled:
            (offer,) = (one for one in plugin.offer(during) if at.slot in one.suppliers and one.answer(at, during))
            slots.append(Filled(at, replace(offer, plugin="kernels/te")))
        other = Filled(linear(), Offer({"Linear.product": object()}, plugin="kernels/other"))
        model: Any = SimpleNamespace(slots=[*slots, other, Filled(linear())])
        return plugin.captures(during, model)

    assert answer(precision_named("bf16"), linear()) is True
    assert answer(fp8(), by(DELAYED), linear()) is True
    assert "with Linear.product by 'fp8-tensorwise'" in str(answer(fp8("tensorwise"), by(TENSORWISE)))
    found = answer(fp8(), by(DELAYED), attention(), fused("activation", "swiglu"))
    assert str(found).endswith("with Attention.core and Linear.activation_product")
    assert "number of rows of each expert" in str(answer(fp8("tensorwise"), experts(TENSORWISE)))


# What it refuses.


def of_recipe(recipe: Recipe) -> tuple[Site, Any]:
    precision = Precision(weights="bfloat16", activations="bfloat16", recipe=recipe)
    return linear(needs=(recipe.need,)), run(precision)


def layer(name: str, inputs: int = 128, outputs: int = 128, tp: int = 1) -> tuple[Site, Any]:
    scaling = name if name in BLACKWELL else name.removeprefix("fp8-")
    return linear(inputs, outputs, (Recipe(name).need,)), run(fp8(scaling), tp=tp)


def named(site: Site, recipe: str, tp: int = 1) -> tuple[Site, Any]:
    return site, run(fp8(recipe), tp=tp, named=NAMED)


@pytest.mark.parametrize(
    ("changes", "given", "words"),
    [
        ({"installed": ""}, (linear(), run()), "Transformer Engine is not installed; install 'mplug-te[te]'"),
        ({"installed": ""}, (linear(), run(device="cpu")), "Transformer Engine is not installed"),
        ({"installed": "2.9.0"}, (linear(), run()), "it supports Transformer Engine 2.20, and 2.9.0 is installed"),
        ({"broken": "no cuDNN\nhere"}, (linear(), run()), "installed, and its import fails: no cuDNN"),
        ({"capability": (7, 5)}, (linear(), run()), "compute capability 8.0 and newer, and this GPU has 7.5"),
        ({}, (linear(), run(device="cpu")), "needs a CUDA GPU, and this run is on the CPU"),
        ({}, (linear(), run(precision_named("fp32"))), "in bf16 or fp16, and trainer.precision=word computes"),
        ({}, (linear(needs=("ringo",)), run()), "it does not offer ringo"),
        ({}, (SOFT_CAP, run()), "it does not offer soft cap"),
        ({}, (attention(LOG_SUM_EXP, DOCUMENTS), run()), "it does not offer log-sum-exp"),
        ({"cudnn": "not today"}, (attention(), run()), "not today"),
        ({}, (attention(dropout=0.1), run()), "dropout in steps of 1/16, and attention dropout is 0.1"),
        ({}, (SINKS, run(deterministic=True)), "no deterministic backward"),
        ({}, layer(DELAYED, 24), "widths that are multiples of 16, and this layer has 24 inputs and 128 outputs"),
        ({}, layer(BLOCKWISE, 128, 64), "multiples of 128, and this layer has 128 inputs and 64 outputs"),
        ({}, layer(DELAYED, 128, 96, tp=4), "128 inputs and 96 outputs, of which a rank has 128 and 24"),
        ({"capability": (8, 9)}, layer(TENSORWISE), "Hopper GPUs (compute capability 9.0), and this GPU has 8.9"),
        ({"capability": (10, 0)}, layer(TENSORWISE), "and this GPU has 10.0"),
        ({"cuda": "12.8"}, layer(BLOCKWISE), "needs CUDA 12.9 or newer, and torch is built with 12.8"),
        ({}, layer("mxfp8"), "MXFP8 needs a Blackwell GPU (compute capability 10.0), and this GPU has 9.0"),
        ({"capability": (10, 0)}, layer("nvfp4"), "does not compute NVFP4, because it has never run on a Blackwell"),
        ({}, of_recipe(Recipe(DELAYED, {"fast": 1})), "does not know the option 'fast' of the recipe 'fp8-delayed'"),
        ({}, of_recipe(Recipe(BLOCKWISE, {"gradient": "float8_e5m2"})), "with gradients in float8_e4m3fn"),
        (
            {},
            of_recipe(Recipe(TENSORWISE, {"forward": "float8_e5m2"})),
            "it computes 'fp8-tensorwise' in float8_e4m3fn",
        ),
        ({}, of_recipe(Recipe("fp8-rowwise", {})), "it does not offer recipe 'fp8-rowwise'"),
        (
            {},
            named(experts(TENSORWISE, 256, 24), "tensorwise"),
            "'up' of … have 256 inputs and 24 outputs; change",
        ),
        ({}, named(experts(BLOCKWISE, 192), "blockwise"), "'up' of … have 192 inputs and 128 outputs; change"),
        ({}, named(experts(TENSORWISE, 256, 48), "tensorwise", tp=2), "48 outputs, of which a rank has 256 and 24"),
        ({}, named(fused("activation", "swiglu", TENSORWISE), "tensorwise"), "only if … known before ('fp8-delayed')"),
        ({}, named(fused("norm", "rmsnorm", BLOCKWISE), "blockwise"), "or set kernels.norm_product=null"),
        ({}, named(fused("activation", "gelu"), "delayed"), "approximation by tanh, and this MLP has the exact one"),
        ({}, named(fused("activation", "reglu"), "delayed"), "it does not offer reglu"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], given: tuple[Site, Any], words: str
) -> None:
    machine(monkeypatch, **changes)
    (answer,) = answers(*given)
    assert all(word in str(answer) for word in words.split(" … "))


@pytest.mark.wide("suites")
def test_neither_importing_it_nor_asking_it_imports_transformer_engine() -> None:
    code = (
        "import sys; sys.modules['transformer_engine'] = None; from types import SimpleNamespace as N; "
        "from mplug_te import TransformerEngine as T, FP8; import mplug_te.linear, mplug_te.attention, mplug_te.norm; "
        "config = N(trainer=N(deterministic=False), kernels=N(kinds={})); "
        "run = N(precision=FP8(FP8.Config()).define_precision(), config=config); "
        "T(T.Config()).offer(run)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_import_sees_the_cudnn_of_torch_unless_the_user_names_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str | None] = []

    def import_module(name: str) -> Any:
        seen.append(os.environ.get("CUDNN_HOME"))
        return SimpleNamespace(TE_DType={})

    monkeypatch.setattr(mplug_te.library, "import_module", import_module)
    monkeypatch.setattr(mplug_te.library, "_folder_of_cudnn", lambda: tmp_path)
    for name in mplug_te.library.CUDNN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    mplug_te.library.library.__wrapped__()
    assert (seen[0], seen[-1], os.environ.get("CUDNN_HOME")) == (str(tmp_path), None, None)
    monkeypatch.setenv("CUDNN_PATH", "/mine")
    mplug_te.library.library.__wrapped__()
    assert os.environ.get("CUDNN_HOME") is None
