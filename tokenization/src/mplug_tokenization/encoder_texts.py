"""The entries of micro batches with texts for an encoder (`mplug.ENCODER_TEXTS`). B samples, T encoder length.

The texts are a stream (`mplug.Stream`) with as many rows for every sample: a text, then padding, which is a segment of
its own that nothing refers to. So the shapes of micro batches do not vary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mplug.layout.plan import ENCODER_TEXTS

FURTHEST = 20
"""The place of a row in its sample is a number of so many bits."""


def entries_of_texts(texts: Sequence[Tensor], sample_ids: Tensor, length: int, padding: int = 0) -> dict[str, Tensor]:
    """The entries for one text [1 to T tokens] of each sample [B], with `length` T rows for each.

    - `encoder_tokens` [1, B T]: the tokens.
    - `encoder_places` [1, B T]: a number of each row that no other sample has, for random numbers.
    - `encoder_lengths` [1, 2 B]: the lengths of each text and of its padding.
    - `encoder_rows` [B, T]: the rows of each sample's text, then -1.
    """
    for text in texts:
        if not 0 < len(text) <= length < 1 << FURTHEST:
            raise ValueError(f"a text of {len(text)} tokens does not fit an encoder length of 1 to {length}")
    number = len(texts)
    tokens = torch.full((number, length), padding, dtype=torch.int64)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    lengths = torch.tensor([len(text) for text in texts])
    within = torch.arange(length)
    places = (sample_ids.to(torch.int64)[:, None] << FURTHEST) + within
    rows = torch.arange(number)[:, None] * length + within
    made = (
        tokens.view(1, -1),
        places.view(1, -1),
        torch.stack((lengths, length - lengths), dim=1).view(1, -1),
        rows.masked_fill(within >= lengths[:, None], -1),
    )
    return dict(zip(ENCODER_TEXTS, made, strict=True))
