"""Attention from packed heads: a core that reads the fused projection itself, and writes the gradient of all of it.

B batch, S sequence, H query heads, G KV heads, K head dim. Without rotary positions and QK-norm, nothing stands between
the projection and the core, and queries, keys and values are views of the projection's output. In backward, autograd
concatenates their three gradients: a pass that reads and writes the whole gradient. A core that knows of the packed
heads can write the three parts of one tensor instead.

The three marks of this module name the function that bears them. `functools.wraps` copies attributes, so a wrap may
carry the mark of the function inside it. Such a mark names another function, and does not count.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from mplug_nn.specification import AttentionInputs, AttentionSpec

C = TypeVar("C", bound=Callable[..., Any])


class PackedHeads:
    """Attention from packed heads, by a supplier of `Attention.core` (`with_packed_heads`); a subclass has `attend`.

    `mplug_nn.Attention` calls it instead of the core if nothing stands between the projection and the core: neither
    rotary positions nor QK-norm, only suppliers of `prepare_qk` and `prepare_qkv` that then change nothing
    (`passing_through`), no cache, and no wrap around the core.
    """

    offers: frozenset[str] = frozenset()
    """The needs (`AttentionSpec.needs`) that `attend` serves beyond the plain case."""
    dropout: bool = False
    """Whether `attend` serves dropout."""

    def serves(self, spec: AttentionSpec) -> bool:
        """Whether `attend` computes a specification. If not, the module calls the core."""
        return spec.needs <= self.offers and (self.dropout or not spec.dropout)

    def attend(
        self, heads: Tensor, num_heads: int, num_kv_heads: int, spec: AttentionSpec, inputs: AttentionInputs
    ) -> Tensor:
        """heads [B, S, H + 2G, K] of any strides, queries first and values last -> [B, S, H, K], differentiable.

        The function is that of the core for the three parts of `heads`. H and G are the heads of this call. Its
        backward returns the gradient of `heads` as one tensor, which the backward operator allocates: an operator must
        not return views of its arguments or of its other results.
        """
        raise NotImplementedError


def with_packed_heads(core: C, packed: PackedHeads) -> C:
    """Mark a supplier of `Attention.core` as one that also computes attention by `packed`, and return the supplier.

    A wrap around the core hides the mark. A wrap that can serve packed heads marks its own function in the same way.
    """
    core.packed_heads = (core, packed)  # type: ignore[attr-defined]
    return core


def packed_heads_of(core: Callable[..., Any]) -> PackedHeads | None:
    """What computes the same function as a core from packed heads, or None."""
    marked, packed = getattr(core, "packed_heads", (None, None))
    return packed if marked is core else None


def passing_through(prepare: C) -> C:
    """Mark a supplier of `Attention.prepare_qk` or `prepare_qkv` that changes no value unless asked to; return it.

    Without weights and without `theta`, it returns its queries and keys, or the three parts of its packed heads. A call
    may then be omitted.
    """
    prepare.passes_through = prepare  # type: ignore[attr-defined]
    return prepare


def passes_through(prepare: Callable[..., Any]) -> bool:
    """Whether a function has the mark of `passing_through`."""
    return getattr(prepare, "passes_through", None) is prepare
