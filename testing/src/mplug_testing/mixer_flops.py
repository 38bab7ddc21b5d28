"""Scans and short convolutions that multiply nothing, for the check of a plan's FLOPs.

B batch, S sequence, G key heads, H value heads, K key width, V value width, C channels, W width of a convolution.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mplug.model.slots.offers import Site

CORES = ("Scan.core", "Convolution.core")


def note_mixers(found: list[Site]) -> list[int]:
    """Replace the cores of scans and convolutions; the list receives the FLOPs per token of every call, with backward.

    A scan costs per head 2 K V multiply-adds (write and read), 3 K V with the delta rule; a convolution W per channel.
    """
    noted: list[int] = []
    for site in found:
        if site.slot in CORES:
            site.module.core = (_scan if site.slot == CORES[0] else _convolution)(noted)
    return noted


def _scan(noted: list[int]) -> Callable[..., tuple[Tensor, None]]:
    def nothing(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, write: Tensor | None, *_: Any) -> tuple[Tensor, None]:
        noted.append(6 * v.shape[2] * q.shape[3] * v.shape[3] * (2 if write is None else 3))
        return v, None

    return nothing


def _convolution(noted: list[int]) -> Callable[..., tuple[Tensor, None]]:
    def nothing(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, None]:
        noted.append(6 * weight.numel())
        return x, None

    return nothing
