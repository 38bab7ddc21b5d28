"""Where the supplier of an offer runs, and which shapes it computes, as the data of the offer say. Imports no torch."""

from collections.abc import Container
from operator import attrgetter
from typing import TYPE_CHECKING

from mplug.errors import listed

if TYPE_CHECKING:
    from mplug.model.offers import Offer, Site
    from mplug.run.run import Run

DEVICES = {"cuda": "a CUDA GPU", "cpu": "a CPU"}
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def limit(offer: "Offer", site: "Site", run: "Run") -> str:
    """Why the data of an offer exclude a run or the shapes of a site; empty if they do not."""
    return _of_device(offer, run) or _of_dtype(offer, run) or _of_chip(offer, run) or _of_shapes(offer, site)


def _of_device(offer: "Offer", run: "Run") -> str:
    if not offer.devices or (device := run.device.partition(":")[0]) in offer.devices:
        return ""
    supported = " or ".join(DEVICES.get(one, one) for one in offer.devices)
    return f"it needs {supported}, and this run is on {'the CPU' if device == 'cpu' else device}"


def _of_dtype(offer: "Offer", run: "Run") -> str:
    if not offer.dtypes or (computed := run.precision.activations) in offer.dtypes:
        return ""
    supported, word = " or ".join(SHORT.get(one, one) for one in offer.dtypes), run.config.trainer.precision
    return f"it computes in {supported}, and trainer.precision={word} computes in {computed}"


def _of_chip(offer: "Offer", run: "Run") -> str:
    if not offer.chips or not run.device.startswith("cuda"):
        return ""
    from torch.cuda import get_device_capability  # keeps torch out of start-up

    own = get_device_capability()
    if any(_admits(chip, own) for chip in offer.chips):
        return ""
    supported = listed(f"{chip[:-1]} and newer" if chip.endswith("+") else chip for chip in offer.chips)
    return f"it supports GPUs of compute capability {supported}, and this GPU has {'.'.join(map(str, own))}"


def _admits(chip: str, own: tuple[int, int]) -> bool:
    major, _, minor = chip.removesuffix("+").partition(".")
    named = int(major), int(minor)
    return own >= named if chip.endswith("+") else own == named


def _of_shapes(offer: "Offer", site: "Site") -> str:
    for name, supported in offer.shapes.items():
        size = attrgetter(name)(site.module)
        if size not in supported:
            return f"it supports {_described(supported)} as {name}, and this site's {name} is {size}"
    return ""


def _described(sizes: Container[int]) -> str:
    if not isinstance(sizes, range):
        return f"{sizes}"
    steps = f"multiples of {sizes.step} from" if sizes.step != 1 and sizes.start % sizes.step == 0 else "sizes of"
    return f"{steps} {sizes.start} to {sizes[-1]}"
