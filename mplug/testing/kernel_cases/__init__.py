"""The calls by which a kernel is judged: for every slot a grid that goes from the plain case to the special ones.

Each case differs from the first of its slot in what its name says, so the case that fails names what is wrong.
"""

import torch

from mplug.testing.kernel_cases.attention import attention_cases
from mplug.testing.kernel_cases.case import SINK, Case, Suppliers, Tensors
from mplug.testing.kernel_cases.dense import dense_cases
from mplug.testing.kernel_cases.ends import end_cases
from mplug.testing.kernel_cases.experts import expert_cases

__all__ = ["SINK", "Case", "Suppliers", "Tensors", "cases"]


def cases() -> list[Case]:
    """The whole grid."""
    with torch.device("meta"):
        return [*attention_cases(), *dense_cases(), *end_cases(), *expert_cases()]
