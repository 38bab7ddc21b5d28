"""A decoder of blocks with two residual branches, and its plan. B batch, S sequence, D embed, M documents."""

from collections.abc import Iterable, Iterator, Sequence
from inspect import signature
from typing import ClassVar

from torch import Tensor, nn

from mplug.contracts.micro_batch import DOCUMENTS, IGNORED, LOSS_WEIGHTS
from mplug.layout.inits import TOKENS, Entries, Inits
from mplug.layout.plan import Parameter, Plan, Shift, Unit
from mplug.model.plans.description import describe
from mplug.model.slots.declaration import Fusible, states
from mplug_nn.dropout import Dropout
from mplug_nn.embedding import Embedding
from mplug_nn.fusible import fusible_norm, normed
from mplug_nn.head import Head
from mplug_nn.moe import MixtureOfExperts
from mplug_nn.multi_token_prediction import DepthAhead, TokensAhead
from mplug_nn.norm import Norm


class TokenEmbedding(nn.Module):
    """Embeds tokens, and positions if they are learned (`num_positions` is then the length of the longest sequence).

    The tokens' vectors are multiplied by `scale`, rounded to their dtype (Gemma).
    """

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, vocab_size: int, dim: int, num_positions: int | None = None, dropout: float = 0.0, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.scale = scale
        self.token = Embedding(vocab_size, dim)
        self.position = Embedding(num_positions, dim) if num_positions is not None else None
        self.dropout = Dropout(dropout)

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the table of positions; the table of tokens describes itself."""
        if self.position is None:
            return {}
        return {"position.weight": Parameter(("positions", "embed"), inits.weight, over=TOKENS)}

    def forward(self, tokens: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        """tokens [B, S], positions [1 or B, S], the samples' random keys [B] -> [B, S, D]."""
        x = self.token(tokens)
        if self.scale != 1.0:
            x = x * x.new_full((), self.scale)
        if self.position is not None:
            x = x + self.position(positions)
        y: Tensor = self.dropout(x, keys, positions)
        return y


PostNorms = tuple[Norm, Norm]
"""The norms of the outputs of attention and of the feed-forward part."""


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)).

    With `post_norms`, each part's output goes through a norm of its own before it is added (sandwich norms, Gemma 2).
    `residual_scale` multiplies it then (Granite).
    `attn(x [B, S, D], positions, keys, document_lengths)` returns [B, S, D]: an `Attention`, or a module of your own.
    Without `norm1`, attention reads x itself: the first block behind an embedding that ends in a norm (ModernBERT).
    `Block` is the common part of `DenseBlock` and `SparseBlock`.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()  # attention mixes positions, in a slot; a router declares its mixing

    def __init_subclass__(cls, **options: object) -> None:
        """Raise TypeError if the subclass defines `feed_forward` without a parameter for the lengths of documents."""
        super().__init_subclass__(**options)
        if "feed_forward" not in vars(cls):
            return
        try:
            signature(vars(cls)["feed_forward"]).bind(cls, "x", "positions", "keys", "lengths")
        except TypeError as error:
            raise TypeError(
                f"{cls.__module__}.{cls.__qualname__}.feed_forward must take (self, x, positions, keys, "
                f"document_lengths): {error}; add the parameter, and hand it to MixtureOfExperts"
            ) from None

    def __init__(
        self,
        norm1: Norm | None,
        attn: nn.Module,
        norm2: Norm,
        dropout: float = 0.0,
        post_norms: PostNorms | None = None,
        residual_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.residual_scale = residual_scale
        self.norm1, self.attn = norm1, attn
        self.dropout1 = Dropout(dropout)
        self.norm2 = norm2
        self.dropout2 = Dropout(dropout)
        self.post_norm1 = post_norms[0] if post_norms else None
        self.post_norm2 = post_norms[1] if post_norms else None

    def feed_forward(self, x: Tensor, positions: Tensor, keys: Tensor, document_lengths: Tensor | None) -> Tensor:
        """The block's second part, without norm and residual: [B, S, D] -> [B, S, D]."""
        raise NotImplementedError

    def norm2_reader(self) -> nn.Module | None:
        """The module to which `feed_forward` hands its x, and nothing else reads x; None if there is none."""
        return None

    def fusibles(self) -> Iterator[Fusible]:
        """The norms whose results only one linear layer reads."""
        if self.norm1 is not None:
            yield from fusible_norm(self.norm1, self.attn)
        yield from fusible_norm(
            self.norm2, self.norm2_reader() if states(self, "norm2_reader", "feed_forward") else None
        )

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        keys: Tensor,
        document_lengths: Tensor | None = None,
        coordinates: Tensor | None = None,
        position_groups: Tensor | None = None,
    ) -> Tensor:
        """x [B, S, D], positions [1 or B, S], keys [B], lengths [B, M] if samples are packed -> [B, S, D].

        `coordinates` [B, S, C] are the positions for attention if these have several coordinates. `position_groups`
        [B, S] are groups of positions that see each other (`AttentionInputs`), for attention that takes them.
        """
        h, x = (x, x) if self.norm1 is None else normed(self.norm1, self.attn, x)
        groups = {} if position_groups is None else {"position_groups": position_groups}
        h = self.attn(h, positions if coordinates is None else coordinates, keys, document_lengths, **groups)
        if self.post_norm1 is not None:
            h, _ = self.post_norm1(h)
        h = self._scaled(h)
        h, x = normed(self.norm2, self.norm2_reader(), self.dropout1(h, keys, positions), x)
        h = self.feed_forward(h, positions, keys, document_lengths)
        if self.post_norm2 is not None:
            h, _ = self.post_norm2(h)
        y: Tensor = self.dropout2(self._scaled(h), keys, positions)
        return x + y

    def _scaled(self, h: Tensor) -> Tensor:
        return h if self.residual_scale == 1.0 else h * self.residual_scale


class DenseBlock(Block):
    """A block whose feed-forward part is an MLP, or a module of your own that is called as `mlp(x [B, S, D])`."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        norm1: Norm | None,
        attn: nn.Module,
        norm2: Norm,
        mlp: nn.Module,
        dropout: float = 0.0,
        post_norms: PostNorms | None = None,
        residual_scale: float = 1.0,
    ) -> None:
        super().__init__(norm1, attn, norm2, dropout, post_norms, residual_scale)
        self.mlp = mlp

    def norm2_reader(self) -> nn.Module:
        """The MLP."""
        return self.mlp

    def feed_forward(self, x: Tensor, positions: Tensor, keys: Tensor, document_lengths: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        y: Tensor = self.mlp(x)
        return y


class SparseBlock(Block):
    """A block whose feed-forward part is a mixture of experts."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        norm1: Norm | None,
        attn: nn.Module,
        norm2: Norm,
        moe: MixtureOfExperts,
        dropout: float = 0.0,
        post_norms: PostNorms | None = None,
        residual_scale: float = 1.0,
    ) -> None:
        super().__init__(norm1, attn, norm2, dropout, post_norms, residual_scale)
        self.moe = moe

    def feed_forward(self, x: Tensor, positions: Tensor, keys: Tensor, document_lengths: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        y: Tensor = self.moe(x, positions, keys, document_lengths)
        return y


class Decoder(nn.Module):
    """The units of a decoder: embedding, blocks, head. The host runs them in the plan's order.

    Blocks may differ. Each is called as `block(x [B, S, D], positions, keys)`, with `document_lengths` by name if
    micro batches have them. With `tied`, the head's projection is the table of tokens. `depths` predict tokens further
    ahead in training (`TokensAhead`), with a loss that is multiplied by `ahead_coefficient`.
    """

    def __init__(
        self,
        embedding: TokenEmbedding,
        blocks: Iterable[nn.Module],
        head: Head,
        *,
        tied: bool = False,
        depths: Sequence[DepthAhead] = (),
        ahead_coefficient: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})
        self.head = head
        if tied:
            self.head.project.weight = self.embedding.token.weight
        self.ahead = TokensAhead(embedding.token, head, depths, ahead_coefficient) if depths else None


def decoder_plan(decoder: Decoder, inits: Inits) -> Plan:
    """The plan of a decoder on the meta device.

    The decoder takes documents (`document_lengths`) if all its blocks do: one block without them would let a position
    see another document.
    """
    packed = all(DOCUMENTS in signature(block.forward).parameters for block in _all_blocks(decoder))
    optional = (DOCUMENTS,) if packed else ()
    takes = ("hidden", "positions", "keys")
    blocks = [Unit(f"blocks.{name}", takes, ("hidden",), optional=optional) for name in decoder.blocks]
    body = (Unit("embedding", ("tokens", "positions", "keys"), ("hidden",)), *blocks)
    shifted = _shifted(decoder)
    weights = {name: one for name, one in shifted.items() if one.entry == LOSS_WEIGHTS}
    inputs = (*takes, *(name for name in shifted if name not in weights))
    ahead = (Unit("ahead", inputs, ("hidden",), optional=(*optional, *weights)),) if shifted else ()
    return describe(decoder, inits).plan(
        units=(*body, *ahead, Unit("head", ("hidden", "labels"), ("loss", "num_targets"), optional=(LOSS_WEIGHTS,))),
        inference=(*body, Unit("head", ("hidden",), ("logits",), method="logits")),
        context={
            "tokens": TOKENS,
            "labels": TOKENS,
            LOSS_WEIGHTS: TOKENS,
            "positions": TOKENS,
            "sample_ids": ("batch",),
            "keys": ("batch",),
            **dict.fromkeys(shifted, TOKENS),
            **({DOCUMENTS: ("batch", "documents")} if packed else {}),
        },
        activations={
            "hidden": (*TOKENS, "embed"),
            "loss": (),
            "num_targets": (),
            "logits": (*TOKENS, "vocab"),
        },
        shifted=shifted,
    )


def _all_blocks(decoder: Decoder) -> list[nn.Module]:
    return [*decoder.blocks.values(), *(decoder.ahead.blocks() if decoder.ahead else ())]


def _shifted(decoder: Decoder) -> dict[str, Shift]:
    """The entries of `TokensAhead`, in the order of its arguments."""
    found: dict[str, Shift] = {}
    for by in range(1, 1 + (len(decoder.ahead.depths) if decoder.ahead else 0)):
        found[f"tokens_{by}"] = Shift("tokens", by, 0)
        found[f"labels_{by}"] = Shift("labels", by, IGNORED)
        found[f"{LOSS_WEIGHTS}_{by}"] = Shift(LOSS_WEIGHTS, by, 0)
    return found
