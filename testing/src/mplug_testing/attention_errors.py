"""The error of attention against the plain composition in fp64, on the same inputs.

B batch, S sequence, H query heads, G KV heads, K head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mplug_nn import AttentionInputs, AttentionSpec
from mplug_nn.attention import scaled_dot_product

Core = Callable[..., Tensor]


@dataclass(frozen=True)
class Heads:
    """The shape of an attention: `b` samples of length `s`, `h` query heads, `g` KV heads, head dimension `k`."""

    b: int
    s: int
    h: int
    g: int
    k: int

    def drawn(self, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """New random numbers in a dtype: a packed projection [B, S, H + 2G, K], and a gradient [B, S, H, K]."""
        packed = torch.randn(self.b, self.s, self.h + 2 * self.g, self.k, device=device).to(dtype)
        return packed, torch.randn(self.b, self.s, self.h, self.k, device=device).to(dtype)


def attention_errors(
    core: Core, heads: Heads, device: str, dtype: torch.dtype = torch.bfloat16
) -> dict[str, tuple[float, float]]:
    """‖found - exact‖ / ‖exact‖ of the output and of dq, dk, dv: (of `core`, of the plain composition in `dtype`).

    The inputs are views of one tensor, like a packed projection's, with new values in every call.
    """
    packed, gradient = heads.drawn(device, dtype)
    exact = _given(scaled_dot_product, heads, packed.double(), gradient.double())
    found, plain = (_given(one, heads, packed, gradient) for one in (core, scaled_dot_product))
    return {name: (_relative(found[name], right), _relative(plain[name], right)) for name, right in exact.items()}


def _given(core: Core, heads: Heads, packed: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of q, k and v."""
    leaf = packed.clone().requires_grad_()
    widths = (heads.h, heads.g, heads.g)
    spec = AttentionSpec(heads.k**-0.5, heads.k, heads.k)
    output = core(*leaf.split(widths, dim=2), spec, AttentionInputs())
    output.backward(gradient)
    assert leaf.grad is not None
    return {"output": output.detach(), **dict(zip(("dq", "dk", "dv"), leaf.grad.split(widths, dim=2), strict=True))}


def _relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())
