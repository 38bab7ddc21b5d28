"""The statements of a supplier of `Attention.core`: attention in parts, and attention from packed heads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from mplug.tensors.supplier import Supplier
from mplug_nn.packed_heads import PackedHeads
from mplug_nn.parts import AttentionParts

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class AttentionCore(Supplier[P, R]):
    """A supplier of `Attention.core` that can do more than compute attention as a whole.

    `parts` computes attention part by part; a core that offers 'log-sum-exp' has it. `packed_heads` computes attention
    from the packed projection (docs/kernels.md). A wrap that can serve packed heads returns an `AttentionCore` too.
    """

    parts: AttentionParts | None = None
    packed_heads: PackedHeads | None = None


def parts_of(core: Callable[..., Any]) -> AttentionParts:
    """The parts of a supplier of `Attention.core`; ValueError if it has none."""
    if not isinstance(core, AttentionCore) or core.parts is None:
        raise ValueError(f"{core!r} computes attention whole only; its offer must not serve 'log-sum-exp'")
    return core.parts


def packed_heads_of(core: Callable[..., Any]) -> PackedHeads | None:
    """What computes the same function as a core from packed heads, or None."""
    return core.packed_heads if isinstance(core, AttentionCore) else None
