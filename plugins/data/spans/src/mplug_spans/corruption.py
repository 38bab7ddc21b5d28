"""Which tokens of a sample are noise, as a function of the seed and the sample's number. B samples, N tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from mplug import IGNORED, MicroBatch
from mplug.tensors.random import key_of, mix
from mplug_spans.lengths import Lengths
from mplug_tokenization.encoder_texts import entries_of_texts

NOISE, KEPT = range(2)
"""The draws of a sample: how the noise is divided into spans, and what is kept between them."""


class Corruption:
    """The span corruption of one split of a run.

    `key` are the seed and the split. The number of a sample grows from epoch to epoch, so every epoch has other spans.
    `sentinels` are the tokens that stand for the first span, the second one, and so on. The decoder has `length`
    tokens, of which the first is `start`; those behind its end are `start` again, and have no targets.
    """

    def __init__(
        self, key: tuple[int, str], lengths: Lengths, length: int, *, sentinels: Sequence[int], end: int, start: int
    ) -> None:
        self.settings = *key, lengths, length, tuple(sentinels), end, start
        self.keys = [key_of(*key, "spans", draw) for draw in (NOISE, KEPT)]
        self.lengths, self.length, self.end, self.start = lengths, length, end, start
        self.sentinels = torch.tensor(list(sentinels[: lengths.spans]), dtype=torch.int64)

    @property
    def fingerprint(self) -> str:
        """A text that is equal for equal corruption."""
        return f"{key_of(*map(str, self.settings)) & (2**64 - 1):016x}"

    def apply(self, batch: MicroBatch) -> MicroBatch:
        """The micro batch with the corrupted texts for the encoder, and the spans for the decoder."""
        tokens, ids = batch["tokens"].to(torch.int64), batch["sample_ids"]
        noise = self.noise_of(ids)
        texts, targets = self._without(tokens, noise), self._without(tokens, ~noise)
        missing = self.length - targets.shape[1]
        counted = tokens.masked_fill(~self._counted(batch), IGNORED)
        labels = pad(self._without(counted, ~noise), (0, missing), value=IGNORED)
        written = pad(targets, (1, missing - 1), value=self.start)
        return {
            "tokens": written,
            "labels": labels,
            "positions": torch.arange(self.length)[None],
            "sample_ids": ids,
            **entries_of_texts(list(texts), ids, texts.shape[1]),
        }

    def _counted(self, batch: MicroBatch) -> Tensor:
        """Whether the source counts a token, which padding is not: [B, N]. The label of the position before it says so.

        The first token of a sample, or behind an end, counts if the one behind it does.
        """
        has_target = batch["labels"] != IGNORED
        begins = pad(batch["tokens"] == self.end, (1, 0), value=True)[:, :-1]
        return pad(has_target, (1, 0))[:, :-1] | (has_target & begins)

    def noise_of(self, sample_ids: Tensor) -> Tensor:
        """Whether a token is noise: [B, N]. A kept part comes first, and noise last."""
        own = self.lengths
        kept = self._parts(KEPT, sample_ids, own.tokens - own.noise)
        lengths = torch.stack((kept, self._parts(NOISE, sample_ids, own.noise)), dim=2).flatten(1)  # [B, 2 spans]
        places = torch.arange(own.tokens).expand(len(sample_ids), -1).contiguous()
        return torch.searchsorted(lengths.cumsum(dim=1), places, right=True) % 2 == 1

    def _parts(self, draw: int, sample_ids: Tensor, total: int) -> Tensor:
        """Lengths [B, spans] of at least 1 that sum to `total`; all such divisions are equally likely."""
        keys = mix(sample_ids.to(torch.int64) ^ self.keys[draw])
        bits = mix(keys[:, None] + torch.arange(1, total))  # [B, total - 1]: a number for each border
        chosen = bits.argsort(dim=1, stable=True)[:, : self.lengths.spans - 1] + 1
        borders = pad(chosen.sort(dim=1).values, (1, 0))
        return torch.diff(pad(borders, (0, 1), value=total), dim=1)

    def _without(self, tokens: Tensor, removed: Tensor) -> Tensor:
        """The tokens with a sentinel in the place of each removed span, and the end behind them."""
        begins = removed & ~pad(removed, (1, 0))[:, :-1]
        number = (begins.cumsum(dim=1) - 1).clamp(min=0)
        replaced = torch.where(removed, self.sentinels[number], tokens)
        left = replaced[~removed | begins].view(len(tokens), -1)
        return pad(left, (0, 1), value=self.end)
