"""Delayed scaling: what a site keeps, and the scales that follow from it at the end of a step. H steps, N sites.

Inputs and gradients have delayed scales. A weight is cast once for each of its versions, so its scale is the current
one.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mplug import Site, SlotBuffer
from mplug_te.casts import scales_of
from mplug_te.recipes import Options

INPUT, GRADIENT = OPERANDS = ("input", "gradient")
TOKENS = ("batch", "sequence")
FIRST = {INPUT: 16.0, GRADIENT: 256.0}
"""The scales of the first step, which has no history: inputs up to 28 and gradients up to 224 are not cut off.

With Transformer Engine's own first scale, 1, most gradients would be rounded to zero.
"""


def history_name(operand: str) -> str:
    """The state with the largest absolute values of an operand in the last steps [H]."""
    return f"{operand}_history"


def scale_name(operand: str) -> str:
    """The state with the scale of an operand [1]."""
    return f"{operand}_scale"


def declared(site: Site, history: int) -> Mapping[str, SlotBuffer]:
    """For each operand: the largest absolute value of the step [], those of the last steps, and the scale."""
    over = {INPUT: (*TOKENS, *site.axes("weight", 1)), GRADIENT: (*TOKENS, *site.axes("weight", 0))}
    buffers: dict[str, SlotBuffer] = {}
    for operand in OPERANDS:
        buffers[operand] = SlotBuffer(over=over[operand], reduction="max")
        buffers[history_name(operand)] = SlotBuffer((history,), ("step",))
        buffers[scale_name(operand)] = SlotBuffer((1,), ("scale",), value=FIRST[operand])
    return buffers


def step_ended(stacked: Mapping[str, Tensor], options: Options) -> dict[str, Tensor]:
    """The step's largest values enter the histories [N, H], and the oldest ones leave them; the scales follow.

    A scale stays if its history has no positive number, or one that is not finite.
    """
    found = {}
    for operand, format_name in zip(OPERANDS, (options.forward, options.gradient), strict=True):
        history = torch.cat((stacked[operand][:, None], stacked[history_name(operand)][:, :-1]), dim=1)
        largest, last = history.amax(dim=1, keepdim=True), stacked[scale_name(operand)]
        scale = scales_of(largest.float(), format_name, options.power_of_two, options.margin).to(last.dtype)
        found[history_name(operand)] = history
        found[scale_name(operand)] = torch.where((largest > 0) & largest.isfinite(), scale, last)
    return found
