"""SwiGLU whose gradient is one kernel: values and gradients beside plain torch in fp64, and where it serves."""

import os
from types import SimpleNamespace
from typing import Any

import mplug_triton
import pytest
import torch
from mplug_triton import supports_swiglu
from mplug_triton.swiglu import activation
from offers import run
from torch import Tensor
from torch.nn import functional as F

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE, dtype)


@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(2, 3, 10), (5, 66), (1, 2 * 1030), (0, 4)], ids=str)
def test_values_and_gradients_are_those_of_plain_torch(shape: tuple[int, ...], dtype: Any, tolerance: float) -> None:
    x, grad = drawn(*shape, seed=0, dtype=dtype), drawn(*shape[:-1], shape[-1] // 2, seed=1, dtype=dtype)
    bias = drawn(shape[-1], seed=2, dtype=dtype)
    found = []
    for wide in (dtype, torch.float64):
        leaves = [one.to(wide).requires_grad_() for one in (x, bias)]
        if wide == dtype:
            y = activation(leaves[0], leaves[1], "swiglu")
        else:
            gate, up = (leaves[0] + leaves[1]).chunk(2, dim=-1)
            y = F.silu(gate) * up
        found.append((y.detach(), *torch.autograd.grad(y, leaves, grad.to(wide))))
    for ours, right in zip(*found, strict=True):
        largest = max(1.0, float(right.abs().max())) if right.numel() else 1.0
        torch.testing.assert_close(ours.double(), right, rtol=0, atol=tolerance * largest)


@pytest.mark.usefixtures("kernels_run")
def test_a_gradient_that_is_not_contiguous_has_its_own_values() -> None:
    x = drawn(6, 8, seed=0, dtype=torch.float32)
    whole, grad = x.requires_grad_(), drawn(4, 6, seed=1, dtype=torch.float32).t()
    (found,) = torch.autograd.grad(activation(whole, None, "swiglu"), whole, grad)
    (right,) = torch.autograd.grad(activation(whole, None, "swiglu"), whole, grad.contiguous())
    assert torch.equal(found, right)


def test_it_serves_swiglu_where_the_config_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mplug_triton, "find_spec", lambda _: SimpleNamespace())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    site: Any = SimpleNamespace(module=SimpleNamespace(kind="swiglu"))
    named = run("cuda", "bf16", activation="kernels/triton")
    assert supports_swiglu(site, named) is True
    assert supports_swiglu(site, run("cuda", "bf16")) is False
    assert supports_swiglu(SimpleNamespace(module=SimpleNamespace(kind="gelu")), named) is False  # type: ignore[arg-type]
