"""Compares attention cores and their parts with those of the plain composition in fp64.

Functions return a fault as a sentence, or the empty string. B batch, S queries, T keys, H query heads, G KV heads, K
head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mplug_nn import AttentionInputs, AttentionSpec
from mplug_nn.attention import scaled_dot_product
from mplug_nn.parts import PLAIN_PARTS, AttentionParts, Lengths, Places
from mplug_nn.specification import RELATIVE

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Maximum absolute error, relative to the largest exact value (or to 1, if that is larger)."""
LENGTH = 13
LENGTHS = ((5, 1, 7, 0), (13, 0, 0, 0))
"""Document lengths of two samples, padded with zeros."""


@dataclass(frozen=True)
class Setting:
    """The heads, dtype and device of a site."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: str

    def drawn(self, seed: int, length: int, heads: int) -> Tensor:
        """Normal numbers [2, length, heads, K]."""
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn(2, length, heads, self.head_dim, generator=generator)
        return numbers.to(self.device, self.dtype)

    def qkv(self, queries: int = LENGTH, keys: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
        """q [2, S, H, K], k and v [2, T, G, K]."""
        kv_heads = self.num_kv_heads
        return self.drawn(1, queries, self.num_heads), self.drawn(2, keys, kv_heads), self.drawn(3, keys, kv_heads)

    def lengths(self, *rows: tuple[int, ...]) -> Tensor:
        """Lengths of segments [B, N]."""
        return torch.tensor(rows, device=self.device)

    def off(self, found: Tensor, exact: Tensor) -> bool:
        """Whether numbers differ too much from the exact ones; NaN always does."""
        finite = exact.isfinite()
        if not torch.equal(found[~finite].double(), exact[~finite]):
            return True
        far = (found[finite].double() - exact[finite]).abs().max()
        return not bool(far <= TOLERANCE[self.dtype] * exact[finite].abs().max().clamp(min=1))


def core_fault(core: Callable[..., Tensor], setting: Setting, **asked: Any) -> str:
    """The fault of a core under a specification with the fields `asked`: `causal`, `documents`."""
    spec = AttentionSpec(0.4, setting.head_dim, setting.head_dim, **asked)
    inputs = AttentionInputs(document_lengths=setting.lengths(*LENGTHS) if spec.documents else None)
    qkv, gradient = setting.qkv(), setting.drawn(4, LENGTH, setting.num_heads)
    outcomes = []
    for call, dtype in ((core, setting.dtype), (scaled_dot_product, torch.float64)):
        q, k, v = leaves = [x.to(dtype).requires_grad_() for x in qkv]
        output = call(q, k, v, spec, inputs)
        outcomes.append((output.detach(), *torch.autograd.grad(output, leaves, gradient.to(dtype))))
    found, exact = outcomes
    return _first_off(setting, ("the output", "dq", "dk", "dv"), found, exact)


def is_specified(core: Callable[..., Tensor], module: Any) -> bool:
    """Whether a core computes the specification of its attention module; without dropout, in fp64."""
    spec: AttentionSpec = replace(module.spec, dropout=0.0)
    setting = Setting(module.num_heads, module.num_kv_heads, spec.key_width, torch.float64, "cpu")
    more = 3 if spec.own_key_length else 0
    q, k, _ = setting.qkv(LENGTH, LENGTH + more)
    v = replace(setting, head_dim=spec.value_width).drawn(3, LENGTH + more, module.num_kv_heads)
    inputs = AttentionInputs(
        document_lengths=setting.lengths(*LENGTHS) if spec.documents else None,
        sinks=setting.drawn(4, 1, module.num_heads)[0, 0, :, 0] if spec.sinks else None,
        bias_table=replace(setting, head_dim=5).drawn(5, 1, module.num_heads)[0, 0] if spec.bias == RELATIVE else None,
        num_heads=module.num_heads,
    )
    found, right = (call(q, k, v, spec, inputs) for call in (core, scaled_dot_product))
    return found.shape == right.shape and torch.allclose(found.double(), right, rtol=1e-6, atol=1e-6)


def parts_fault(parts: AttentionParts, setting: Setting, packed: bool) -> str:
    """The fault of an attention's parts; if `packed`, segments are tried too."""
    full, same = (
        (setting.lengths((2, 0, 5), (0, 7, 0)), setting.lengths((6, 3, 0), (1, 4, 4))),
        setting.lengths(*LENGTHS),
    )
    tried: list[tuple[str, int, bool, Lengths | None]] = [
        ("a causal part", LENGTH, True, None),
        ("a full part", 9, False, None),
    ]
    if packed:
        tried += [
            ("a causal part in stretches", LENGTH, True, (same, same)),
            ("a full part in stretches", 9, False, full),
        ]
    for part, keys, causal, lengths in tried:
        queries = LENGTH if causal else 7
        found = _part_fault(parts, setting, setting.qkv(queries, keys), causal, lengths)
        if found:
            return f"of {part}, {found}"
    return ""


def placed_parts_fault(parts: AttentionParts, setting: Setting, packed: bool) -> str:
    """The fault of an attention's parts by position; if `packed`, segments are tried too."""
    own, others = (range(4, 9), range(20, 24)), (range(2), range(6, 13))
    groups = setting.lengths((-1, 0, 0, 0, -1, 2, 2, -1, 3), (0, 0, -1, -1, 1, 1, 1, 1, 1))
    of_others = setting.lengths((-1, -1, 0, 0, 0, -1, 2, 3, 3), (0, 0, 0, -1, -1, 1, 1, 1, 1))
    tried = [
        ("a causal part with a window", True, Places(own, own, 3)),
        ("a full part with a window", False, Places(own, others, 4)),
        ("a causal part with a window and other keys", True, Places(own, others, 6)),
        ("a causal part with groups", True, Places(own, others, None, (groups, of_others))),
        ("a causal part with groups and a window", True, Places(own, own, 2, (groups, groups))),
    ]
    segments = setting.lengths((2, 0, 7), (0, 9, 0)), setting.lengths((5, 3, 1), (1, 4, 4))
    for name, causal, places in tried:
        for lengths in (None, segments) if packed else (None,):
            found = _part_fault(parts, setting, setting.qkv(9, 9), causal, lengths, places)
            if found:
                return f"of {name}, {found}"
    return ""


def _part_fault(
    parts: AttentionParts,
    setting: Setting,
    inputs: tuple[Tensor, Tensor, Tensor],
    causal: bool,
    lengths: Lengths | None,
    places: Places | None = None,
) -> str:
    """The fault of one part. The whole has further keys: its log-sum-exp is larger, and its output differs."""
    named: dict[str, Any] = {"scale": 0.4, "causal": causal, "lengths": lengths, "places": places}
    q, k, v = inputs
    wide = (q.double(), k.double(), v.double())
    whole, gradient = (setting.drawn(seed, q.shape[1], q.shape[2]) for seed in (5, 6))
    exact = PLAIN_PARTS.forward(*wide, **named)
    more = torch.logaddexp(exact[1], torch.ones_like(exact[1]))
    right = (*exact, *PLAIN_PARTS.backward(gradient.double(), *wide, whole.double(), more, **named))
    sums = more.to(torch.promote_types(q.dtype, torch.float32))
    given = (*parts.forward(q, k, v, **named), *parts.backward(gradient, q, k, v, whole, sums, **named))
    return _first_off(setting, ("the output", "the log-sum-exp", "dq", "dk", "dv"), given, right)


def _first_off(
    setting: Setting, names: tuple[str, ...], found: tuple[Tensor, ...], exact: tuple[Tensor, ...], how: str = ""
) -> str:
    for name, result, expected in zip(names, found, exact, strict=True):
        where = f"{name} {how}".strip()
        if result.shape != expected.shape:
            return f"{where} has shape {tuple(result.shape)} instead of {tuple(expected.shape)}"
        if setting.off(result, expected):
            return f"{where} has an error of {float((result.double() - expected).abs().nan_to_num(0.0).max()):.3g}"
    return ""
