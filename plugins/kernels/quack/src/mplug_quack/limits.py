"""The sites and runs that the kernels serve, and the reasons against all others."""

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING

from mplug import Site
from mplug_quack.mlp import KINDS
from mplug_quack.needs import EPILOGUES, PRODUCTS, missing
from mplug_quack.rows import ALIGNED

if TYPE_CHECKING:
    from mplug import Run


def supports_mlp(site: Site, run: "Run") -> bool | str:
    """True for GELU, exact or by tanh, in bf16 on a Hopper GPU with QuACK installed; else the reason."""
    if site.module.kind not in KINDS:
        return f"it supports the activations {' and '.join(KINDS)}, and this site's activation is {site.module.kind}"
    outputs, inputs = site.module.up.weight.shape
    return _supports(run, (inputs, outputs), f"this MLP has widths {inputs} and {outputs}", EPILOGUES)


def supports_experts(site: Site, run: "Run") -> bool | str:
    """True for experts in bf16 on a Hopper GPU with QuACK installed; else the reason."""
    (outputs, inputs), (_, hidden) = (_part(site, run, weight) for weight in ("up", "down"))
    stated = f"a rank's part of these experts has widths {inputs}, {outputs} and {hidden}"
    return _supports(run, (inputs, outputs, hidden), stated, PRODUCTS)


def _supports(run: "Run", widths: Iterable[int], stated: str, module: str) -> bool | str:
    if run.device != "cuda":
        return "it needs a Hopper GPU, and this run is on the CPU"
    if run.precision.activations != "bfloat16":
        word, format_ = run.config.trainer.precision, run.precision.activations
        return f"it computes in bf16, and trainer.precision={word} computes in {format_}"
    if any(width % ALIGNED for width in widths):
        return f"it supports multiples of {ALIGNED} as widths, and {stated}"
    return missing(module) or True


def _part(site: Site, run: "Run", weight: str) -> tuple[int, ...]:
    """(outputs, inputs) of a rank's part of a weight [e, O, I]."""
    shape = tuple(getattr(site.module, weight).shape)
    if weight not in site.parameters:
        return shape[1:]
    return tuple(shape[dim] // _degree(run, set(site.axes(weight, dim))) for dim in (1, 2))


def _degree(run: "Run", named: set[str]) -> int:
    """The number of parts into which the layout divides one of these named axes."""
    return prod(axis.size for axis in run.mesh.axes.values() if named.intersection(axis.splits))
