"""The runs and sites that the products serve, and the reasons against all others."""

from typing import TYPE_CHECKING

import torch

from mplug import Recipe, Site, triton_builds
from mplug_fp8.emulation import BLOCK, ROWS
from mplug_fp8.recipes import BLOCKWISE, DELAYED, NAMES, ROWWISE, Options

if TYPE_CHECKING:
    from mplug import Run

ADA, HOPPER = (8, 9), (9, 0)
BLOCKWISE_CUDA = (12, 9)


def supports_linear(site: Site, run: "Run") -> bool | str:
    """True if the products compute the site in the run's recipe; else the reason."""
    return _supports(site, run, ("weight",))


def supports_experts(site: Site, run: "Run") -> bool | str:
    """The same for the grouped product of experts."""
    return _supports(site, run, ("up", "down"))


def supports_norm(site: Site, run: "Run") -> bool | str:
    """The same for a norm and the linear layer after it."""
    return _supports_fused(site, run)


def supports_activation(site: Site, run: "Run") -> bool | str:
    """The same for an activation and the linear layer after it."""
    return _supports_fused(site, run)


def _supports_fused(site: Site, run: "Run") -> bool | str:
    """Only delayed scaling knows the scale of an operand before the operand exists."""
    recipe, kind = run.precision.recipe, site.slot.rpartition(".")[2]
    if recipe is None or recipe.name == DELAYED:
        return _supports(site, run, ("weight",))
    return (
        f"it fuses only operands of '{DELAYED}', whose scales are known before, and trainer.precision asks for "
        f"'{recipe.name}'; set precisions.fp8.when=delayed, or kernels.{kind}=null"
    )


def note(site: Site, run: "Run") -> str:
    """Which implementation computes."""
    return "emulated on a CPU" if run.device == "cpu" else ""


def _supports(site: Site, run: "Run", weights: tuple[str, ...]) -> bool | str:
    recipe = run.precision.recipe
    if recipe is None:
        return False
    if recipe.name not in NAMES:
        return f"it computes the recipes {', '.join(NAMES)}, and trainer.precision asks for '{recipe.name}'"
    if site.slot == "Experts.product" and recipe.name != ROWWISE:
        return (
            f"torch multiplies groups of rows only with a scale for each row ('{ROWWISE}'), and trainer.precision asks "
            f"for '{recipe.name}'; set precisions.fp8.scaling=rowwise, or name the experts in trainer.base_modules"
        )
    return (
        _against_recipe(recipe, run)
        or next((reason for weight in weights if (reason := _against_shape(site, run, weight, recipe.name))), "")
        or _against_device(recipe, run)
        or True
    )


def _against_recipe(recipe: Recipe, run: "Run") -> str:
    try:
        options = Options.of(recipe)
    except TypeError as error:
        return f"it does not know an option of the recipe '{recipe.name}' ({error})"
    if run.precision.activations != "bfloat16":
        return f"it quantises bf16, and trainer.precision computes in {run.precision.activations}"
    return options.fault(recipe.name)


def _against_shape(site: Site, run: "Run", weight: str, recipe: str) -> str:
    """A rank's part of the weight must consist of whole pieces of operands."""
    multiple = BLOCK if recipe == BLOCKWISE else ROWS
    shape = tuple(getattr(site.module, weight).shape)[-2:]
    part = _part(site, run, weight)
    if any(size % multiple for size in part):
        local = "" if part == shape else f", of which a rank has {part[0]} by {part[1]}"
        return (
            f"'{recipe}' needs widths that are multiples of {multiple}, and this site's weight is {shape[0]} by "
            f"{shape[1]}{local}; name the module in trainer.base_modules"
        )
    return ""


def _part(site: Site, run: "Run", weight: str) -> tuple[int, ...]:
    """(outputs, inputs) of the part of a weight that a rank multiplies by."""
    shape = tuple(getattr(site.module, weight).shape)
    if weight not in site.parameters:
        return shape[-2:]
    found = []
    for dim in (len(shape) - 2, len(shape) - 1):
        size, named = shape[dim], set(site.axes(weight, dim))
        for axis in run.mesh.axes.values():
            if named.intersection(axis.splits):
                size //= axis.size
        found.append(size)
    return tuple(found)


def _against_device(recipe: Recipe, run: "Run") -> str:
    if run.device == "cpu":
        return ""
    if not run.device.startswith("cuda"):
        return f"it needs a CUDA GPU or a CPU, and trainer.device is '{run.device}'"
    capability = torch.cuda.get_device_capability()
    chip = ".".join(map(str, capability))
    if recipe.name == BLOCKWISE and capability[0] != HOPPER[0]:
        return f"torch multiplies blocks of 128 numbers on GPUs of compute capability 9.0, and this GPU has {chip}"
    if recipe.name == BLOCKWISE and _cuda() < BLOCKWISE_CUDA:
        return (
            f"torch multiplies blocks of 128 numbers with CUDA 12.9 or newer, and this torch has {torch.version.cuda}"
        )
    least = HOPPER if recipe.name == ROWWISE else ADA
    if capability < least:
        return f"'{recipe.name}' needs compute capability {'.'.join(map(str, least))}, and this GPU has {chip}"
    if not triton_builds():
        return "on a GPU it needs Triton, a C compiler and Python's headers, and one of them is not installed"
    return ""


def _cuda() -> tuple[int, ...]:
    """The version of CUDA that torch is built with."""
    return tuple(int(part) for part in (torch.version.cuda or "0").split("."))
