"""Delayed scaling: what a site keeps, and the scales that follow from it at the end of a step.

H steps of history, N sites. Inputs and gradients have delayed scales. A weight is quantised once per step, so its own
largest absolute value costs little, and its scale is the current one.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mplug import Site, SlotBuffer
from mplug_fp8.emulation import scales_of
from mplug_fp8.recipes import Options

INPUT, GRADIENT = OPERANDS = ("input", "gradient")
TOKENS = ("batch", "sequence")
FIRST = {INPUT: 16.0, GRADIENT: 256.0}
"""The scales of the first step, which has no history. They keep inputs up to 28 and gradients up to 224."""


def scale_name(operand: str) -> str:
    """The buffer of an operand's scale."""
    return f"{operand}_scale"


def history_name(operand: str) -> str:
    """The buffer of an operand's history."""
    return f"{operand}_history"


def declared(site: Site, history: int) -> Mapping[str, SlotBuffer]:
    """For each operand: the largest absolute value of the step [], those of the last steps [H], and the scale [1]."""
    over = {INPUT: (*TOKENS, *site.axes("weight", 1)), GRADIENT: (*TOKENS, *site.axes("weight", 0))}
    buffers: dict[str, SlotBuffer] = {}
    for operand in OPERANDS:
        buffers[operand] = SlotBuffer(over=over[operand], reduction="max")
        buffers[history_name(operand)] = SlotBuffer((history,), ("step",))
        buffers[scale_name(operand)] = SlotBuffer((1,), ("scale",), value=FIRST[operand])
    return buffers


def step_ended(stacked: Mapping[str, Tensor], options: Options) -> dict[str, Tensor]:
    """The step's largest values enter the histories [N, H], and the oldest ones leave them; the scales follow.

    Without a positive number in the history the scale stays.
    """
    found = {}
    for operand in OPERANDS:
        history = torch.cat((stacked[operand][:, None], stacked[history_name(operand)][:, :-1]), dim=1)
        largest = history.amax(dim=1, keepdim=True)
        dtype = getattr(torch, options.gradient if operand == GRADIENT else options.forward)
        scale, _ = scales_of(largest, dtype, options.power_of_two)
        last = stacked[scale_name(operand)]
        found[history_name(operand)] = history
        found[scale_name(operand)] = torch.where(largest > 0, scale.to(last.dtype) / 2**options.margin, last)
    return found
