"""Where the supplier of an offer runs, and which shapes it computes, as the data of the offer say. Imports no torch."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from mplug.errors import listed

if TYPE_CHECKING:
    from mplug.run.run import Run

DEVICES = {"cuda": "a CUDA GPU", "cpu": "a CPU"}
NO_GPU = "needs a CUDA GPU, and this run is on the CPU"
"""In the reason of a supplier: what keeps it from serving any site of a run on the CPU."""
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


@dataclass(frozen=True)
class Limits:
    """The devices, formats, chips and shapes that a supplier is for, as `Offer` describes them."""

    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    chips: tuple[str, ...]
    shapes: Mapping[str, Container[int]]

    def reason(self, module: Any, run: "Run") -> str:
        """Why they exclude a run, or a module of a site; empty if they do not."""
        return self._of_device(run) or self._of_dtype(run) or self._of_chip(run) or self._of_shapes(module)

    def _of_device(self, run: "Run") -> str:
        if not self.devices or (device := run.device.partition(":")[0]) in self.devices:
            return ""
        supported = " or ".join(DEVICES.get(one, one) for one in self.devices)
        return f"it needs {supported}, and this run is on {'the CPU' if device == 'cpu' else device}"

    def _of_dtype(self, run: "Run") -> str:
        if not self.dtypes or (computed := run.precision.activations) in self.dtypes:
            return ""
        supported, word = " or ".join(SHORT.get(one, one) for one in self.dtypes), run.config.trainer.precision
        return f"it computes in {supported}, and trainer.precision={word} computes in {computed}"

    def _of_chip(self, run: "Run") -> str:
        if not self.chips or not run.device.startswith("cuda"):
            return ""
        from torch.cuda import get_device_capability  # keeps torch out of start-up

        own = get_device_capability()
        if any(_admits(chip, own) for chip in self.chips):
            return ""
        supported = listed(f"{chip[:-1]} and newer" if chip.endswith("+") else chip for chip in self.chips)
        return f"it supports GPUs of compute capability {supported}, and this GPU has {'.'.join(map(str, own))}"

    def _of_shapes(self, module: Any) -> str:
        for name, supported in self.shapes.items():
            size = attrgetter(name)(module)
            if size not in supported:
                return f"it supports {_described(supported)} as {name}, and this site's {name} is {size}"
        return ""


def _admits(chip: str, own: tuple[int, int]) -> bool:
    major, _, minor = chip.removesuffix("+").partition(".")
    named = int(major), int(minor)
    return own >= named if chip.endswith("+") else own == named


def _described(sizes: Container[int]) -> str:
    if not isinstance(sizes, range):
        return f"{sizes}"
    steps = f"multiples of {sizes.step} from" if sizes.step != 1 and sizes.start % sizes.step == 0 else "sizes of"
    return f"{steps} {sizes.start} to {sizes[-1]}"
