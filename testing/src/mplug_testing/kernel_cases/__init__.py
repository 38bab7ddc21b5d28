"""The cases of the kernel suite: for every slot a grid of calls, from the plain case to the special ones.

Each case differs from the first of its slot in what its name says, so the name of a failing case indicates the cause.
"""

from functools import cache

import torch

from mplug_testing.kernel_cases.attention import attention_cases
from mplug_testing.kernel_cases.case import BUFFERS, SINK, Case, Suppliers, Tensors
from mplug_testing.kernel_cases.dense import dense_cases
from mplug_testing.kernel_cases.ends import end_cases
from mplug_testing.kernel_cases.experts import expert_cases
from mplug_testing.kernel_cases.mixers import mixer_cases
from mplug_testing.kernel_cases.streams import stream_cases

__all__ = ["BUFFERS", "SINK", "Case", "Suppliers", "Tensors", "cases"]


@cache
def cases() -> tuple[Case, ...]:
    """All cases of all slots, which every check of a suite reads: a trial copies the inputs and binds modules anew."""
    with torch.device("meta"):
        return (
            *attention_cases(),
            *dense_cases(),
            *end_cases(),
            *expert_cases(),
            *mixer_cases(),
            *stream_cases(),
        )
