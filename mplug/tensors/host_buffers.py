"""Buffers that the host fills: a module registers them with what they are for, and reads their values in `forward`."""

from typing import Literal

import torch
from torch import Tensor, nn

Purpose = Literal["site key", "loss scale", "token scale"]
"""What the host writes into a buffer.

- 'site key', int64 []: a number that follows from the seed of the run and the name of the module.
- 'loss scale' []: the factor by which the model's loss is multiplied before backward, for `add_auxiliary`.
- 'token scale' []: this factor times targets / tokens of the global batch, for a loss that is a mean over all tokens.
"""
PURPOSES = "host_buffers"
"""The attribute of a module with the purposes of its buffers, by name."""


def register_host_buffer(module: nn.Module, name: str, purpose: Purpose) -> None:
    """Register a buffer that the host fills before training. Checkpoints do not have it, and a plan does not name it.

    Until then, a key is 0, and a scale is 1.
    """
    first = torch.zeros((), dtype=torch.int64) if purpose == "site key" else torch.ones(())
    module.register_buffer(name, first, persistent=False)
    setattr(module, PURPOSES, {**getattr(module, PURPOSES, {}), name: purpose})


def purpose_of(module: nn.Module, name: str) -> Purpose | None:
    """The purpose of a module's buffer; None if the host does not fill it."""
    purposes: dict[str, Purpose] = getattr(module, PURPOSES, {})
    return purposes.get(name)


def host_buffers(module: nn.Module, purpose: Purpose) -> list[tuple[nn.Module, str]]:
    """The buffers in a module and its submodules that have a purpose: the module that has it, and its name there."""
    return [(part, name) for part in module.modules() for name in part._buffers if purpose_of(part, name) == purpose]


def fill_host_buffers(module: nn.Module, purpose: Purpose, value: Tensor) -> None:
    """Make `value` the buffers with a purpose: one tensor for all of them, so that later changes need no copy."""
    for part, name in host_buffers(module, purpose):
        part._buffers[name] = value
