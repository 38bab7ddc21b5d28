"""Ringo against mplug's own suite of kernels, and its blocks against each other."""

from typing import ClassVar

import pytest
import torch

from mplug_nn import AttentionInputs, AttentionSpec
from mplug_testing import KernelSuite


class TestRingo(KernelSuite):
    plugin = "ringo"
    settings: ClassVar = {"kernels.ringo.block": 16}


@pytest.mark.parametrize("block", [1, 3, 64])
def test_blocks_of_any_size_give_the_same(block: int) -> None:
    from nova_ringo.blocks import attention

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 37, heads, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    spec = AttentionSpec(0.3, 8, 8)
    one, other = (attention(q, k, v, spec, AttentionInputs(), block=size) for size in (block, 37))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
