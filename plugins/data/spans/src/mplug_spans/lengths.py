"""The lengths of corrupted samples. No torch."""

from bisect import bisect_right
from typing import NamedTuple


class Lengths(NamedTuple):
    """The tokens of a sample, those of them that are noise, and the spans that the noise consists of."""

    tokens: int
    noise: int
    spans: int

    @property
    def encoder(self) -> int:
        """Tokens of the encoder: what is kept, a sentinel for each span, and the end."""
        return self.tokens - self.noise + self.spans + 1

    @property
    def decoder(self) -> int:
        """Tokens of the decoder: the noise, a sentinel before each span, and the end."""
        return self.noise + self.spans + 1


def lengths_of(tokens: int, density: float, mean_span: float) -> Lengths:
    """The lengths of a sample of at least two tokens."""
    noise = min(max(round(tokens * density), 1), tokens - 1)
    spans = min(max(round(noise / mean_span), 1), noise, tokens - noise)
    return Lengths(tokens, noise, spans)


MOST = 1 << 40
"""Tokens beyond which no longer sample is searched."""


def longest(encoder_length: int, density: float, mean_span: float) -> Lengths | None:
    """The longest sample whose corrupted text fits into the encoder; None if none does.

    So the lengths of T5's authors follow: 568 tokens for 512 in the encoder, of which the decoder writes 114. The text
    of the encoder is at least as long for a longer sample, so bisection finds it, however much of it is noise.
    """
    high = 2
    while high < MOST and lengths_of(high, density, mean_span).encoder <= encoder_length:
        high *= 2
    sizes = range(2, high + 1)
    fitting = bisect_right(sizes, encoder_length, key=lambda tokens: lengths_of(tokens, density, mean_span).encoder)
    return lengths_of(sizes[fitting - 1], density, mean_span) if fitting else None
