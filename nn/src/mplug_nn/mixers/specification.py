"""What a scan and a short convolution compute: static specifications, and the tensors that come with a call.

B batch, S sequence, M documents of a sample, G key heads, H value heads, K key width, V value width, C channels,
W width of the convolution.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from mplug.contracts.micro_batch import DOCUMENTS as DOCUMENTS

STATES = "states"
"""The need of a site, or of a wrap, that passes a start state to the core or reads its end state."""
DECAY, CHANNEL_DECAY, DELTA, CHANNEL_DELTA = "decay", "channel decay", "delta", "channel delta"
ScanKind = Literal["decay", "channel decay", "delta", "channel delta"]
SCANS = frozenset({CHANNEL_DECAY, DELTA, CHANNEL_DELTA, DOCUMENTS, STATES})
"""The needs of scans that plain torch serves. A core without needs computes the kind 'decay'."""
CONVOLUTIONS = frozenset({DOCUMENTS, STATES})
"""The needs of short convolutions that plain torch serves."""


@dataclass(frozen=True)
class ScanSpec:
    """What a site's scan computes; equal specifications describe the same function.

    A head has a state S [K, V]. At every position, with log decay g, key k, value v, query q and write strength b:

    - 'decay': S <- exp(g) S + k vᵀ, with one decay per head. It is the recurrence of Mamba-2 (arXiv 2405.21060), where
      q, k and v are C, B and dt x, and of linear attention with a scalar gate.
    - 'channel decay': the same with one decay for each of the K channels of a key (GLA, arXiv 2312.06635).
    - 'delta': S <- exp(g) S, then S <- S + b k (v - Sᵀ k)ᵀ (gated delta net, arXiv 2412.06464).
    - 'channel delta': the same with one decay for each channel of a key (KDA, arXiv 2510.26692).

    Then y = scale Sᵀ q. With `documents`, the state is zero at the first position of every document. With `states`, a
    call has a start state, or its caller reads the end state.
    """

    kind: ScanKind
    scale: float
    key_width: int
    value_width: int
    documents: bool = False
    states: bool = False

    @property
    def corrects(self) -> bool:
        """Whether a write replaces what the state returns for the key (the delta rule)."""
        return self.kind in (DELTA, CHANNEL_DELTA)

    @property
    def by_channel(self) -> bool:
        """Whether every channel of a key has a decay of its own."""
        return self.kind in (CHANNEL_DECAY, CHANNEL_DELTA)

    @property
    def needs(self) -> frozenset[str]:
        """What a supplier must offer beyond the kind 'decay'."""
        wanted = {self.kind: self.kind != DECAY, DOCUMENTS: self.documents, STATES: self.states}
        return frozenset(need for need, is_wanted in wanted.items() if is_wanted)


@dataclass(frozen=True)
class ConvolutionSpec:
    """What a site's short convolution computes.

    y_t = activation(bias + sum over d < width of weight[:, width - 1 - d] x_(t - d)), for each channel alone. The
    activation is SiLU, or none. With `documents`, a position sees rows of its own document only. `states` is as in
    `ScanSpec`.
    """

    width: int
    silu: bool = True
    documents: bool = False
    states: bool = False

    @property
    def needs(self) -> frozenset[str]:
        """What a supplier must offer."""
        wanted = {DOCUMENTS: self.documents, STATES: self.states}
        return frozenset(need for need, is_wanted in wanted.items() if is_wanted)


class MixerInputs(NamedTuple):
    """The tensors of a call that a scan and a convolution share; a tensor that a call does not have is None."""

    document_lengths: Tensor | None = None
    """[B, M], int64, in the order of the documents; each row sums to S, padded with zeros."""
    state: Tensor | None = None
    """The start state: of a scan [B, H, K, V], of a convolution the W - 1 rows before the first one, [B, W - 1, C].

    It belongs to the document of the first position. If this position begins a document, the caller passes zeros. None:
    zeros.
    """


NOTHING = MixerInputs()
