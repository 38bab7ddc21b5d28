"""Which tokens of a sample are masked, as a function of the seed and the sample's number. B samples, S tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from mplug import DOCUMENTS, IGNORED, MicroBatch
from mplug.tensors.random import key_of, mix

CHOICE, KIND, REPLACEMENT = range(3)
"""The draws of a position: whether it is chosen, what becomes of it, and by which token it is replaced."""


class Masks:
    """The masks of one split of a run.

    `key` are the seed and the split. The number of a sample grows from epoch to epoch, so every epoch has other masks.
    `kept` are tokens that are never chosen. `continuing` says of each token whether it continues the word of the token
    before it; None: every token is a word.
    """

    def __init__(
        self,
        key: tuple[int, str],
        rate: float,
        mask_share: float,
        random_share: float,
        *,
        mask: int,
        vocab_size: int,
        kept: Sequence[int] = (),
        continuing: Sequence[bool] | None = None,
    ) -> None:
        self.settings = *key, rate, mask_share, random_share, mask, vocab_size, tuple(kept), continuing
        self.keys = [key_of(*key, "mask", draw) for draw in (CHOICE, KIND, REPLACEMENT)]
        self.rate, self.mask_share, self.random_share = rate, mask_share, random_share
        self.mask, self.vocab_size = mask, vocab_size
        self.kept = torch.tensor(list(kept), dtype=torch.int64)
        self.continuing = None if continuing is None else torch.tensor(list(continuing))

    @property
    def fingerprint(self) -> str:
        """A text that is equal for equal masks."""
        return f"{key_of(*map(str, self.settings)) & (2**64 - 1):016x}"

    def apply(self, batch: MicroBatch) -> MicroBatch:
        """The micro batch with masked tokens, and labels at the chosen positions only.

        Only tokens that the source's labels count are chosen: neither padding nor the prompts of conversations.
        """
        tokens = batch["tokens"]
        places = torch.arange(tokens.shape[1]).expand_as(tokens)  # [B, S]
        chosen, kind, replacement = (self._bits(draw, batch["sample_ids"], places) for draw in range(3))
        is_kept = torch.isin(tokens, self.kept)
        is_chosen = _uniform(chosen.gather(1, self._words(batch, is_kept))) < self.rate
        is_chosen &= self._counted(batch, is_kept) & ~is_kept
        share = _uniform(kind)
        is_masked = is_chosen & (share < self.mask_share)
        is_random = is_chosen & ~is_masked & (share < self.mask_share + self.random_share)
        random = (replacement & (2**62 - 1)) % self.vocab_size
        masked = torch.where(is_random, random.to(tokens.dtype), tokens).masked_fill(is_masked, self.mask)
        return {**batch, "tokens": masked, "labels": tokens.masked_fill(~is_chosen, IGNORED)}

    def _bits(self, draw: int, sample_ids: Tensor, places: Tensor) -> Tensor:
        """Random int64 [B, S] of one draw, by the numbers of samples [B] and positions [B, S]."""
        return mix(mix(sample_ids.to(torch.int64) ^ self.keys[draw])[:, None] + places)

    def _counted(self, batch: MicroBatch, is_kept: Tensor) -> Tensor:
        """Whether the source counts a token: [B, S].

        The label of the position before it says so. The first token of a document counts if the one behind it does.
        Without the lengths of documents, a document begins behind a token of `kept`.
        """
        has_target = batch["labels"] != IGNORED
        begins = pad(is_kept, (1, 0), value=True)[:, :-1] if DOCUMENTS not in batch else self._document_begins(batch)
        return pad(has_target, (1, 0))[:, :-1] | (has_target & begins)

    @staticmethod
    def _document_begins(batch: MicroBatch) -> Tensor:
        """Whether a position is the first of a document: [B, S]."""
        begins = torch.zeros_like(batch["tokens"], dtype=torch.bool)
        begins[:, 0] = True
        ends = batch[DOCUMENTS].cumsum(dim=1)  # the last one, S, is behind the sample
        return pad(begins, (0, 1)).scatter(1, ends, True)[:, :-1]

    def _words(self, batch: MicroBatch, is_kept: Tensor) -> Tensor:
        """The position of the first token of each token's word: [B, S]."""
        tokens = batch["tokens"]
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        if self.continuing is None:
            return places
        begins = ~self.continuing[tokens.long()] | is_kept
        begins[:, 1:] |= is_kept[:, :-1]
        begins[:, 0] = True
        if DOCUMENTS in batch:
            begins |= self._document_begins(batch)
        return places.masked_fill(~begins, 0).cummax(dim=1).values


def _uniform(bits: Tensor) -> Tensor:
    """fp32 numbers in [0, 1) from random int64."""
    return ((bits >> 40) & (2**24 - 1)).to(torch.float32) * 2.0**-24
