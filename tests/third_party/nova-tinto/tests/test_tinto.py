"""The precisions keep their contract, and the rounding is that of IEEE 754."""

from typing import ClassVar

import pytest
import torch

from mplug_testing import PrecisionSuite


class TestTinto(PrecisionSuite):
    plugin = "tinto"
    settings: ClassVar = {"kernels.linear": "press"}
    layouts = ("dp2", "tp2", "zero2", "fsdp2", "pp2")
    tolerance = 0.02


class TestPatient(PrecisionSuite):
    plugin = "patient"
    layouts = ("zero2", "fsdp2")


@pytest.mark.parametrize(("bits", "dtype"), [(8, torch.bfloat16), (11, torch.float16)])
def test_rounding_is_that_of_a_format_with_as_many_bits(bits: int, dtype: torch.dtype) -> None:
    from nova_tinto.pressed import pressed

    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) + 1.0
    x = x[x.abs() > 1e-3]  # fp16 has fewer bits near zero
    ties = torch.tensor([1 + 2.0**-bits, 1 + 3 * 2.0**-bits])
    x = torch.cat([x, -x, ties])
    assert torch.equal(pressed(x, bits), x.to(dtype).float())
