"""Attention from packed heads: a core that reads the fused projection itself, and writes the gradient of all of it.

B batch, S sequence, H query heads, G KV heads, K head dim. Without rotary positions and QK-norm, nothing stands between
the projection and the core, and queries, keys and values are views of the projection's output. In backward, autograd
concatenates their three gradients: a pass that reads and writes the whole gradient. A core that knows of the packed
heads can write the three parts of one tensor instead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from mplug.tensors.supplier import Supplier
from mplug_nn.specification import AttentionInputs, AttentionSpec

P = ParamSpec("P")
R = TypeVar("R")


class PackedHeads:
    """Attention from packed heads, by a supplier of `Attention.core` (`AttentionCore`); a subclass has `attend`.

    `mplug_nn.Attention` calls it instead of the core if nothing stands between the projection and the core: neither
    rotary positions nor QK-norm, only suppliers of `prepare_qk` and `prepare_qkv` that then change nothing
    (`Preparation`), no cache, and no wrap around the core.
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


@dataclass(frozen=True, eq=False)
class Preparation(Supplier[P, R]):
    """A supplier of `Attention.prepare_qk` or `prepare_qkv`.

    `passes_through`: it changes no value unless asked to. Without weights and without `theta`, it returns its queries
    and keys, or the three parts of its packed heads. A call may then be omitted.
    """

    passes_through: bool = False


def passes_through(prepare: Callable[..., Any]) -> bool:
    """Whether a content of `Attention.prepare_qk` or `prepare_qkv` states that it passes its arguments through."""
    return isinstance(prepare, Preparation) and prepare.passes_through
