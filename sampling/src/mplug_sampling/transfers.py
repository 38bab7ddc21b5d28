"""Values on their way between the CPU and the device, for which neither waits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class OnTheWay:
    """Tensors on their way to the CPU, as they are when this object is made; a later step may overwrite them."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if not tensors[0].is_cuda:
            self._values = [x.clone() for x in tensors]
            return
        self._values = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
        for value, x in zip(self._values, tensors, strict=True):
            value.copy_(x, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def read(self) -> list[list[Any]]:
        """The numbers of each tensor, when the device has computed them."""
        if self._copied is not None:
            self._copied.synchronize()
        return [value.tolist() for value in self._values]


def sent(values: Sequence[Any], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Numbers of the CPU in a tensor on the device; the CPU does not wait until the device has done its work."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
