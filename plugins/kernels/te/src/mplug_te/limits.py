"""What Transformer Engine can compute on this machine: the answers of `supports` for products and norms."""

from math import prod
from typing import TYPE_CHECKING

import torch

from mplug import Recipe, Site
from mplug_te.library import missing
from mplug_te.recipes import BLACKWELL, BLOCKWISE, DELAYED, NAMES, Options, options_of

if TYPE_CHECKING:
    from mplug import Run

HALF = ("bfloat16", "float16")
HOPPER, BLACKWELL_CHIP = (9, 0), (10, 0)
ALIGNED, BLOCK = 16, 128
"""Multiples of the widths of FP8 products: of tensorwise scaled operands, and of operands in blocks."""
FIRST_CUDA_OF_BLOCKS = (12, 9)
RECIPES = frozenset(Recipe(name).need for name in (*NAMES, *BLACKWELL))
"""The needs of sites whose products follow a recipe of this plugin."""


def supports_half(site: Site, run: "Run") -> bool | str:
    """Products in bf16 or fp16; False for sites that need a recipe, which another offer serves."""
    return False if RECIPES & site.needs else runs(run) or True


def supports_fp8(name: str, site: Site, run: "Run", weights: tuple[str, ...] = ("weight",)) -> bool | str:
    """Products by the recipe `name`, alone or after a prologue."""
    if reason := runs(run):
        return reason
    widths = (_refused_widths(name, site, run, weight) for weight in weights)
    if reason := refused_by_chip(name) or next(filter(None, widths), ""):
        return reason
    options = options_of(run.precision.recipe) if run.precision.recipe is not None else Options()
    if isinstance(options, str):
        return options
    if run.precision.activations != "bfloat16":
        word, format_ = run.config.trainer.precision, run.precision.activations
        return f"its FP8 products take and return bf16, and trainer.precision={word} has activations in {format_}"
    return True


def supports_norm_product(name: str, site: Site, run: "Run") -> bool | str:
    """A norm together with the product of its result."""
    return _not_fused(name, "norm") or supports_fp8(name, site, run)


def supports_activation(name: str, site: Site, run: "Run") -> bool | str:
    """An activation together with the product of its result."""
    if reason := _not_fused(name, "activation"):
        return reason
    if "gelu" in site.needs:
        return (
            "Transformer Engine's GELU is its approximation by tanh, and this MLP has the exact one; set "
            "model.activation=gelu_tanh or kernels.activation_product=null"
        )
    return supports_fp8(name, site, run)


def _not_fused(name: str, prologue: str) -> str:
    """Why a recipe's scales do not allow a fusion; empty if they do."""
    if name == DELAYED:
        return ""
    return (
        f"Transformer Engine computes a norm or an activation in FP8 only if the scale is known before ('{DELAYED}'), "
        f"and trainer.precision asks for '{name}'; choose the recipe '{DELAYED}', or set "
        f"kernels.{prologue}_product=null"
    )


def supports_experts(name: str, site: Site, run: "Run") -> bool | str:
    """The products of experts by the recipe `name`."""
    return supports_fp8(name, site, run, weights=("up", "down"))


def refuses_blackwell(name: str, site: Site, run: "Run") -> bool | str:
    """The reason against a recipe for Blackwell."""
    if reason := runs(run):
        return reason
    capability = torch.cuda.get_device_capability()
    if capability < BLACKWELL_CHIP:
        return (
            f"{BLACKWELL[name]} needs a Blackwell GPU (compute capability 10.0), and this GPU has "
            f"{_dotted(capability)}; set precisions.te-fp8.recipe to delayed, tensorwise or blockwise"
        )
    return (
        f"this version of mplug-te does not compute {BLACKWELL[name]}, because it has never run on a Blackwell GPU; "
        f"set trainer.precision=bf16"
    )


def supports_norm(site: Site, run: "Run") -> bool | str:
    """Norms in bf16 or fp16."""
    return runs(run) or True


def _refused_widths(name: str, site: Site, run: "Run", weight: str) -> str:
    """Why a rank's part of a weight [..., O, I] cannot be an operand; the empty string if it can."""
    multiple = BLOCK if name == BLOCKWISE else ALIGNED
    shape = getattr(site.module, weight).shape
    outputs, inputs = shape[-2:]
    last = len(shape) - 1
    parts = outputs / _degree(site, run, weight, last - 1), inputs / _degree(site, run, weight, last)
    if all(width % multiple == 0 for width in parts):
        return ""
    local = "" if parts == (outputs, inputs) else f", of which a rank has {parts[1]:g} and {parts[0]:g}"
    owner = "this layer has" if weight == "weight" else f"the matrices '{weight}' of these experts have"
    return (
        f"'{name}' needs widths that are multiples of {multiple}, and {owner} {inputs} inputs and {outputs} "
        f"outputs{local}; change the widths, or add the layer to trainer.base_modules"
    )


def _degree(site: Site, run: "Run", weight: str, dim: int) -> int:
    """The number of parts into which the layout divides a dimension of a weight."""
    named = set(site.axes(weight, dim)) if weight in site.parameters else set()
    return prod(axis.size for axis in run.mesh.axes.values() if named.intersection(axis.splits))


def refused_by_chip(name: str) -> str:
    """Why this machine cannot compute a recipe of FP8, or the empty string."""
    capability = torch.cuda.get_device_capability()
    if capability != HOPPER:
        return f"its FP8 products support Hopper GPUs (compute capability 9.0), and this GPU has {_dotted(capability)}"
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if name == BLOCKWISE and cuda < FIRST_CUDA_OF_BLOCKS:
        return f"'{name}' needs CUDA 12.9 or newer, and torch is built with {_dotted(cuda)}"
    return ""


def runs(run: "Run") -> str:
    """Why this machine cannot run Transformer Engine's kernels in the run's formats, or the empty string."""
    if reason := missing(run.device):
        return reason
    if run.precision.activations not in HALF:
        word, format_ = run.config.trainer.precision, run.precision.activations
        return f"it computes in bf16 or fp16, and trainer.precision={word} computes in {format_}"
    return ""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
