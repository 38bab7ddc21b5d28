"""Attention of a kernel on a GPU beside the composition in fp64, at sizes of several blocks.

B batch, S queries, H query heads, G KV heads, K head dim.
"""

from typing import Any

import torch
from torch import Tensor

from mplug_nn import AttentionInputs, AttentionSpec
from mplug_nn.attention import scaled_dot_product
from mplug_nn.specification import RELATIVE
from mplug_testing.attention_errors import Heads, attention_errors

B, H, G, K, REACH = 2, 8, 2, 64, 20
SPECS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 100},
    "documents": {"documents": True},
    "documents, full": {"documents": True, "causal": False},
    "sinks": {"sinks": True},
    "narrower values": {"value_width": 32},
    "more keys": {"own_key_length": True},
    "more keys, full": {"own_key_length": True, "causal": False},
}
"""What every kernel of GPUs serves but flash-attn."""


def spec_of(width: int = K, **asked: Any) -> AttentionSpec:
    return AttentionSpec(**{"scale": width**-0.5, "key_width": width, "value_width": width, **asked})


def inputs_of(spec: AttentionSpec, dtype: torch.dtype, s: int, more: int) -> tuple[list[Tensor], dict[str, Any]]:
    """(q, k, v, then sinks and table if the specification has them; the remaining inputs by name).

    `s` queries; `more` keys than queries if the specification allows it.
    """
    t = s + more if spec.own_key_length else s
    shapes: list[tuple[int, ...]] = [(B, s, H, spec.key_width), (B, t, G, spec.key_width), (B, t, G, spec.value_width)]
    shapes += [(H,)] if spec.sinks else []
    shapes += [(H, 2 * REACH + 1)] if spec.bias == RELATIVE else []
    generator = torch.Generator("cuda").manual_seed(s)
    leaves = [torch.randn(shape, device="cuda", generator=generator).to(dtype).requires_grad_() for shape in shapes]
    lengths = torch.tensor(((200, 1, s - 201, 0), (s, 0, 0, 0)), device="cuda") if spec.documents else None
    runs = torch.arange(s, device="cuda") // 40  # every second run of 40 positions is a group
    groups = torch.where(runs % 2 == 1, runs // 2, -1).expand(B, s).contiguous() if spec.position_groups else None
    heads = {"first_head": H, "num_heads": 2 * H}
    return leaves, {"document_lengths": lengths, "position_groups": groups, **heads}


def outcome(core: Any, spec: AttentionSpec, leaves: list[Tensor], named: dict[str, Any]) -> list[Tensor]:
    trained = list(leaves[3:])
    sinks = trained.pop(0) if spec.sinks else None
    table = trained.pop(0) if spec.bias == RELATIVE else None
    output = core(*leaves[:3], spec, AttentionInputs(sinks=sinks, bias_table=table, **named))
    gradient = torch.randn(output.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient.bfloat16().to(output.dtype))]


def assert_within_band(
    core: Any, spec: AttentionSpec, given: tuple[list[Tensor], dict[str, Any]], factor: float, least: float
) -> None:
    """Relative errors against fp64 are at most `factor` times those of the composition in the same type, or `least`."""
    leaves, named = given
    exact = outcome(scaled_dot_product, spec, [x.detach().double().requires_grad_() for x in leaves], named)
    found, plain = (outcome(one, spec, leaves, named) for one in (core, scaled_dot_product))
    names = ["output", "dq", "dk", "dv", *(["dsinks"] if spec.sinks else []), *(["dtable"] if spec.bias else [])]
    for name, ours, usual, right in zip(names, found, plain, exact, strict=False):
        error, allowed = (float((x.double() - right).norm() / right.norm()) for x in (ours, usual))
        assert error <= max(factor * allowed, least), f"{name} is off by {error:.2e}; plain torch by {allowed:.2e}"
        assert ours.dtype == usual.dtype


def assert_within_bf16_band_of_views(core: Any, heads: Heads) -> None:
    """The same in bf16 with views of a packed projection; no error is larger than 1e-2."""
    for name, (error, usual) in attention_errors(core, heads, "cuda").items():
        assert error <= min(1e-2, 2 * usual), f"{name} is off by {error:.2e}; plain torch in bf16 by {usual:.2e}"
