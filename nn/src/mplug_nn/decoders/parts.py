"""The parts of a decoder as a config describes them: data without torch, until `build` makes the module.

The fields of a part have the names of the arguments of its module in `mplug_nn`, where they are documented. Widths are
those of the whole model.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import AfterValidator

from mplug_nn.open_lists import ACTIVATIONS, DIVISIONS, NORMS, SCORES
from mplug_nn.rotary import Rotary

if TYPE_CHECKING:
    from torch import nn

    from mplug_nn.attention import Attention
    from mplug_nn.decoder import TokenEmbedding
    from mplug_nn.latent import LatentAttention
    from mplug_nn.mixers.mixer import Mixer
    from mplug_nn.mlp import MLP
    from mplug_nn.moe import MixtureOfExperts
    from mplug_nn.norm import Norm

ActivationName = Annotated[str, AfterValidator(ACTIVATIONS.check)]
"""A field of a config that names an activation of the open list."""
NormName = Annotated[str, AfterValidator(NORMS.check)]
"""A field of a config that names a norm of the open list."""
DivisionName = Annotated[str, AfterValidator(DIVISIONS.check)]
"""A field of a config that names a division of rotary positions of the open list."""
MixerKind = Literal["gated_delta", "mamba2", "kimi_delta", "gated_linear"]
"""The mixers with a scan (`ScanConfig`)."""
ScoreName = Annotated[str, AfterValidator(SCORES.check)]
"""A field of a config that names a router's score of the open list."""


class PartConfig(Protocol):
    """A part of a block, or a whole block: the bundled ones below, or a frozen dataclass of your own."""

    def build(self, hidden_size: int) -> "nn.Module":
        """The module, for a residual stream of this width. The import of torch belongs inside this method."""


@dataclass(frozen=True)
class NormConfig:
    """A norm: `mplug_nn.Norm`."""

    kind: str = "rmsnorm"
    eps: float = 1e-5
    bias: bool = False

    def build(self, hidden_size: int) -> "Norm":
        """The norm."""
        from mplug_nn.norm import Norm

        return Norm(hidden_size, **vars(self))


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention with its projections: `mplug_nn.Attention`. `theta` None: no rotary positions."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    theta: float | Rotary | None
    bias: bool = False
    qk_norm: bool = False
    dropout: float = 0.0
    eps: float = 1e-5
    causal: bool = True
    window: int | None = None
    documents: bool = False
    soft_cap: float | None = None
    sinks: bool = False
    attention_bias: str = ""
    scale: float | None = None
    qk_norm_offset: bool = False
    out_bias: bool | None = None
    position_groups: bool = False
    output_gate: bool = False

    def build(self, hidden_size: int) -> "Attention":
        """The attention."""
        from mplug_nn.attention import Attention

        return Attention(hidden_size, **vars(self))


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-head latent attention: `mplug_nn.LatentAttention`."""

    num_heads: int
    q_rank: int | None
    kv_rank: int
    key_width: int
    rotary_width: int
    value_width: int
    rotary: Rotary | None
    scale: float | None = None
    dropout: float = 0.0
    latent_eps: float = 1e-6
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    def build(self, hidden_size: int) -> "LatentAttention":
        """The attention."""
        from mplug_nn.latent import LatentAttention

        return LatentAttention(hidden_size, **vars(self))


@dataclass(frozen=True, kw_only=True)
class ScanConfig:
    """A mixer with a scan in the place of attention: the module of `mplug_nn` that `kind` names.

    'gated_delta' is a `GatedDeltaNet`, 'mamba2' a `Mamba2` (key heads are its groups, the key width that of a state),
    'kimi_delta' a `KimiDeltaAttention`, 'gated_linear' a `GatedLinearAttention`. The last two have as many key heads as
    value heads, and the last one has no convolution. `time_step_limit` is that of a `Mamba2`.
    """

    kind: MixerKind
    num_key_heads: int
    num_value_heads: int
    key_width: int
    value_width: int
    conv_width: int = 4
    eps: float = 1e-6
    time_step_limit: tuple[float, float] = (0.0, math.inf)

    def build(self, hidden_size: int) -> "Mixer":
        """The mixer."""
        from mplug_nn.mixers.gated_delta import GatedDeltaNet
        from mplug_nn.mixers.gated_linear import GatedLinearAttention
        from mplug_nn.mixers.kimi_delta import KimiDeltaAttention
        from mplug_nn.mixers.mamba import Mamba2

        keys, values, width, eps = self.num_key_heads, self.num_value_heads, self.conv_width, self.eps
        if self.kind == "gated_delta":
            widths = self.key_width, self.value_width
            return GatedDeltaNet(hidden_size, keys, values, *widths, conv_width=width, eps=eps)
        if self.kind == "mamba2":
            heads = values, self.value_width, keys, self.key_width
            return Mamba2(hidden_size, *heads, conv_width=width, eps=eps, time_step_limit=self.time_step_limit)
        heads_of_both = values, self.key_width, self.value_width
        if self.kind == "kimi_delta":
            return KimiDeltaAttention(hidden_size, *heads_of_both, conv_width=width, eps=eps)
        return GatedLinearAttention(hidden_size, *heads_of_both, eps=eps)


@dataclass(frozen=True)
class MLPConfig:
    """A dense feed-forward part: `mplug_nn.MLP`."""

    ffn_dim: int
    kind: str = "swiglu"
    bias: bool = False

    def build(self, hidden_size: int) -> "MLP":
        """The MLP."""
        from mplug_nn.mlp import MLP

        return MLP(hidden_size, **vars(self))


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts: `mplug_nn.Gating`, `mplug_nn.Router` and `mplug_nn.MixtureOfExperts`."""

    ffn_dim: int
    num_experts: int
    top_k: int
    kind: str = "swiglu"
    score: str = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    normalize: bool = True
    scale: float = 1.0
    balance: Literal["none", "micro_batch", "sequence", "global_batch"] = "none"
    balance_coefficient: float = 0.0
    z_coefficient: float = 0.0
    bias_rate: float = 0.0
    jitter: float = 0.0
    capacity_factor: float | None = None
    dropping: Literal["position", "probability"] = "probability"
    shared_ffn_dim: int = 0
    shared_gate: bool = False
    group_best: int = 2
    choice_bias: bool | None = None
    logit_bias: bool = False
    bias: bool = False
    latent_dim: int | None = None

    def build(self, hidden_size: int) -> "MixtureOfExperts":
        """The router and its experts."""
        from mplug_nn.moe import MixtureOfExperts
        from mplug_nn.router import Gating, Router

        gating = Gating(**self._arguments_of(Gating))
        router = Router(hidden_size, gating, **self._arguments_of(Router))
        return MixtureOfExperts(router, hidden_size, **self._arguments_of(MixtureOfExperts))

    def _arguments_of(self, function: Callable[..., Any]) -> dict[str, Any]:
        """The fields that are arguments of a function."""
        arguments = signature(function).parameters
        return {name: value for name, value in vars(self).items() if name in arguments}


@dataclass(frozen=True)
class BlockConfig:
    """A block: `mplug_nn.SparseBlock` if its feed-forward part is a mixture of experts, else `mplug_nn.DenseBlock`.

    The norms are equal. `dropout` is that of each part's output. With `post_norms`, the output of each part has a norm.
    Without `first_norm`, attention reads the residual stream itself.
    `residual_scale` multiplies the output of each part before it is added.
    """

    norm: NormConfig
    attention: PartConfig
    feed_forward: PartConfig
    dropout: float = 0.0
    post_norms: bool = False
    first_norm: bool = True
    residual_scale: float = 1.0

    def build(self, hidden_size: int) -> "nn.Module":
        """The block."""
        from mplug_nn.decoder import DenseBlock, SparseBlock
        from mplug_nn.moe import MixtureOfExperts

        norm1 = self.norm.build(hidden_size) if self.first_norm else None
        norm2 = self.norm.build(hidden_size)
        attn, feed_forward = self.attention.build(hidden_size), self.feed_forward.build(hidden_size)
        post = (self.norm.build(hidden_size), self.norm.build(hidden_size)) if self.post_norms else None
        if isinstance(feed_forward, MixtureOfExperts):
            return SparseBlock(norm1, attn, norm2, feed_forward, self.dropout, post, self.residual_scale)
        return DenseBlock(norm1, attn, norm2, feed_forward, self.dropout, post, self.residual_scale)


@dataclass(frozen=True)
class BranchConfig:
    """A block of a single branch: `mplug_nn.ExpertsBranch`, `MLPBranch` or `MixerBranch`, by what `part` builds."""

    norm: NormConfig
    part: PartConfig

    def build(self, hidden_size: int) -> "nn.Module":
        """The block."""
        from mplug_nn.branch import ExpertsBranch, MixerBranch, MLPBranch
        from mplug_nn.mlp import MLP
        from mplug_nn.moe import MixtureOfExperts

        norm, part = self.norm.build(hidden_size), self.part.build(hidden_size)
        if isinstance(part, MixtureOfExperts):
            return ExpertsBranch(norm, part)
        return MLPBranch(norm, part) if isinstance(part, MLP) else MixerBranch(norm, part)


@dataclass(frozen=True)
class BranchesConfig:
    """Branches in the place of one block: `mplug_nn.Branches`."""

    branches: tuple[BranchConfig, ...]

    def build(self, hidden_size: int) -> "nn.Module":
        """The block."""
        from mplug_nn.branch import Branches

        return Branches(branch.build(hidden_size) for branch in self.branches)


@dataclass(frozen=True)
class EmbeddingConfig:
    """The embedding: `mplug_nn.TokenEmbedding`. With `tied`, the output projection is its table of tokens."""

    num_positions: int | None = None
    dropout: float = 0.0
    tied: bool = False
    scale: float = 1.0

    def build(self, vocab_size: int, hidden_size: int) -> "TokenEmbedding":
        """The embedding."""
        from mplug_nn.decoder import TokenEmbedding

        return TokenEmbedding(vocab_size, hidden_size, self.num_positions, self.dropout, self.scale)


def tower_block(
    norm: NormConfig, hidden_size: int, num_heads: int, mlp: MLPConfig, theta: Rotary | None = None
) -> BlockConfig:
    """A block over the rows of a stream: attention with biases sees the whole segment of a row, and nothing else."""
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        theta=theta,
        bias=True,
        causal=False,
        documents=True,
    )
    return BlockConfig(norm, attention, mlp)
