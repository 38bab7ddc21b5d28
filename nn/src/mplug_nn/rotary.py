"""Rotary positions (RoFormer, arXiv 2104.09864) and their variants, as data. Imports no torch.

A pair i of n pairs turns by position * frequency_i; the plain frequencies are theta^(-i / n). If positions have several
coordinates (time, row, column), each pair turns by one of them.
"""

import inspect
import math
from dataclasses import dataclass
from typing import Any

from mplug.errors import listed, suggest
from mplug_nn.open_lists import DIVISIONS, SCALINGS

SCALED, PARTIAL, INTERLEAVED = "scaled rotary", "partial rotary", "interleaved rotary"
COORDINATES = "coordinate rotary"
ROTARY_NEEDS = frozenset({SCALED, PARTIAL, INTERLEAVED, COORDINATES})
"""The needs of sites whose rotary positions are not plain."""
Scaled = tuple[tuple[float, ...], float]
"""The frequencies of the pairs, and the factor of the cosines and sines."""
Divided = tuple[tuple[int, ...], tuple[float, ...]]
"""For each pair the coordinate by which it turns, and the exponent x of its plain frequency theta^-x."""


@dataclass(frozen=True)
class Rotary:
    """How queries and keys turn with their positions.

    `scaling` is a name of the open list `mplug.rotary_scalings`, with its `options`; empty: the plain frequencies. The
    first `width` coordinates of a head turn, and the others do not; None: all of them turn. Coordinate i is paired with
    coordinate i + width / 2, or with the next one if `interleaved` (0 with 1, 2 with 3, ...).

    `division` is a name of the open list `mplug.rotary_divisions`: it says by which coordinate of a position each pair
    turns; `sections` are its numbers of pairs. Empty: positions have one coordinate.
    """

    theta: float
    scaling: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    width: int | None = None
    interleaved: bool = False
    division: str = ""
    sections: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.scaling:
            check_scaling(self.scaling, dict(self.options))
        if self.division:
            DIVISIONS.check(self.division)
        if self.width is not None and (self.width < 2 or self.width % 2):
            raise ValueError(f"rotary positions turn pairs of coordinates, so their width cannot be {self.width}")

    @property
    def score_factor(self) -> float:
        """What YaRN with `mscale_all_dim` multiplies attention scores by (arXiv 2405.04434); 1 for other scalings."""
        options = dict(self.options)
        return attention_scale(options.get("factor", 1.0), options.get("mscale_all_dim") or 0.0) ** 2

    def turns(self, head_dim: int) -> "float | Turns":
        """How the pairs of a head turn, as slots receive it: `theta` if plain rotary positions are meant."""
        if not self.scaling and not self.interleaved and not self.division and self.width in (None, head_dim):
            return self.theta
        half = (self.width or head_dim) // 2
        coordinates, exponents = self._divided(half)
        try:
            plain = tuple(self.theta**-exponent for exponent in exponents)
            frequencies, factor = plain, 1.0
            if self.scaling:
                frequencies, factor = SCALINGS.load(self.scaling)(plain, self.theta, **dict(self.options))
        except OverflowError:
            raise ValueError(f"rope_theta={self.theta} gives frequencies that are no finite numbers") from None
        if len(frequencies) != half:
            raise ValueError(f"the scaling '{self.scaling}' returns {len(frequencies)} frequencies for {half} pairs")
        needs = {
            SCALED: bool(self.scaling),
            PARTIAL: 2 * half < head_dim,
            INTERLEAVED: self.interleaved,
            COORDINATES: bool(self.division),
        }
        wanted = frozenset(need for need, is_wanted in needs.items() if is_wanted)
        return Turns(tuple(map(float, frequencies)), float(factor), self.interleaved, wanted, coordinates)

    def _divided(self, pairs: int) -> Divided:
        if not self.division:
            return (), tuple(pair / pairs for pair in range(pairs))
        coordinates, exponents = DIVISIONS.load(self.division)(pairs, self.sections)
        if len(coordinates) != pairs or len(exponents) != pairs:
            raise ValueError(f"the division '{self.division}' does not divide {pairs} pairs over coordinates")
        return coordinates, exponents


@dataclass(frozen=True)
class Turns:
    """How the first pairs of a head turn: by position times `frequencies`; cosines and sines are times `factor`.

    Coordinates behind the last pair do not turn. `needs` are what a supplier of `Attention.prepare_qk` or `prepare_qkv`
    must offer: 'scaled rotary' (these frequencies, or the factor), 'partial rotary', 'interleaved rotary', 'coordinate
    rotary'. With the last, `coordinates` has for each pair the coordinate of the position by which the pair turns.
    Positions are then [1 or B, S, C], or [1 or B, S] if all coordinates of every position are equal.
    """

    frequencies: tuple[float, ...]
    factor: float
    interleaved: bool
    needs: frozenset[str]
    coordinates: tuple[int, ...] = ()


def check_scaling(name: str, options: dict[str, Any]) -> None:
    """Raise ValueError if a scaling is unknown, or if its options do not fit."""
    SCALINGS.check(name)
    parameters = dict(list(inspect.signature(SCALINGS.load(name)).parameters.items())[2:])
    for option in options:
        if option not in parameters:
            raise ValueError(
                f"the scaling '{name}' has no option '{option}'{suggest(option, parameters)} (options: "
                f"{listed(parameters)})"
            )
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in options]
    if missing:
        raise ValueError(f"the scaling '{name}' needs the option '{missing[0]}'")


# The scalings. Each takes the plain frequencies, theta and its options, and returns `Scaled`. The options are called as
# in the `rope_parameters` of published configs.


def linear(frequencies: tuple[float, ...], theta: float, *, factor: float) -> Scaled:
    """Positions divided by `factor` (arXiv 2306.15595)."""
    _require_stretch("linear", factor)
    return tuple(frequency / factor for frequency in frequencies), 1.0


def llama3(
    frequencies: tuple[float, ...],
    theta: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Scaled:
    """Wavelengths near or above the original length are divided by `factor` (Llama 3.1)."""
    _require_stretch("llama3", factor)
    _require_positive(
        "llama3",
        low_freq_factor=low_freq_factor,
        high_freq_factor=high_freq_factor,
        original_max_position_embeddings=original_max_position_embeddings,
    )
    if not high_freq_factor > low_freq_factor:
        raise ValueError(
            f"the scaling 'llama3' needs high_freq_factor={high_freq_factor} above low_freq_factor={low_freq_factor}"
        )
    found = []
    for frequency in frequencies:
        turns = original_max_position_embeddings * frequency / (2 * math.pi)
        share = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        share = min(max(share, 0.0), 1.0)
        found.append((1 - share) * frequency / factor + share * frequency)
    return tuple(found), 1.0


def yarn(
    frequencies: tuple[float, ...],
    theta: float,
    *,
    factor: float,
    original_max_position_embeddings: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    truncate: bool = True,
) -> Scaled:
    """YaRN (arXiv 2309.00071, section 3): pairs that turn rarely in the original length are divided by `factor`.

    `attention_factor` None: 0.1 ln(factor) + 1, or with both mscales the quotient of `attention_scale` for the two.
    """
    _require_stretch("yarn", factor)
    _require_positive(
        "yarn",
        original_max_position_embeddings=original_max_position_embeddings,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
    )
    for name, value in (("attention_factor", attention_factor), ("mscale", mscale), ("mscale_all_dim", mscale_all_dim)):
        if value:
            _require_positive("yarn", **{name: value})
    if theta == 1:
        raise ValueError("the scaling 'yarn' needs another rope_theta than 1, of which it takes the logarithm")
    half = len(frequencies)
    if attention_factor is None:
        attention_factor = attention_scale(factor, 1.0)
        if mscale and mscale_all_dim:
            attention_factor = attention_scale(factor, mscale) / attention_scale(factor, mscale_all_dim)

    def pair_that_turns(times: float) -> float:
        return half * math.log(original_max_position_embeddings / (times * 2 * math.pi)) / math.log(theta)

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    high = high + 0.001 if low == high else high
    shares = (min(max((pair - low) / (high - low), 0.0), 1.0) for pair in range(half))
    scaled = zip(frequencies, shares, strict=True)
    return tuple(frequency / factor * share + frequency * (1 - share) for frequency, share in scaled), attention_factor


def longrope(
    frequencies: tuple[float, ...],
    theta: float,
    *,
    factor: float,
    long_factor: tuple[float, ...],
    original_max_position_embeddings: int,
    short_factor: tuple[float, ...] | None = None,
    attention_factor: float | None = None,
) -> Scaled:
    """LongRoPE (arXiv 2402.13753): each pair has a divisor of its own, found by a search.

    `attention_factor` None: sqrt(1 + ln(factor) / ln(original length)). The transformers library divides by
    `short_factor` if no position of a batch exceeds the original length. A run divides by `long_factor` at every
    length, so that its loss does not depend on which samples share a batch. So `short_factor` is None, or equal to it.
    """
    _require_stretch("longrope", factor)
    _require_positive("longrope", original_max_position_embeddings=original_max_position_embeddings)
    if isinstance(long_factor, str) or not isinstance(long_factor, tuple | list):
        raise ValueError(f"the scaling 'longrope' needs a list of numbers as 'long_factor', not {long_factor!r}")
    for number in long_factor:
        _require_positive("longrope", long_factor=number)
    if len(long_factor) != len(frequencies):
        raise ValueError(
            f"the scaling 'longrope' needs a divisor for each of the {len(frequencies)} pairs of a head, and "
            f"long_factor has {len(long_factor)}"
        )
    if short_factor is not None and tuple(short_factor) != tuple(long_factor):
        raise ValueError(
            "the scaling 'longrope' uses long_factor at every length, so that a loss does not depend on the longest "
            "sample of a batch; remove short_factor, or set it to long_factor"
        )
    if attention_factor is None:
        if factor > 1 and original_max_position_embeddings < 2:
            raise ValueError("the scaling 'longrope' needs original_max_position_embeddings above 1")
        stretched = math.log(factor) / math.log(original_max_position_embeddings) if factor > 1 else 0.0
        attention_factor = math.sqrt(1 + stretched)
    _require_positive("longrope", attention_factor=attention_factor)
    divided = zip(frequencies, long_factor, strict=True)
    return tuple(frequency / divisor for frequency, divisor in divided), attention_factor


def _require_stretch(scaling: str, factor: float) -> None:
    _require_positive(scaling, factor=factor)
    if factor < 1:
        raise ValueError(
            f"the scaling '{scaling}' divides positions by 'factor' for longer sequences, so it needs at least 1, not "
            f"{factor:g}; for the factor 1/n, set n"
        )


def _require_positive(scaling: str, **options: Any) -> None:
    """Raise ValueError for an option that is no finite number above 0."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"the scaling '{scaling}' needs a number above 0 as '{name}', not {value!r}")


def attention_scale(factor: float, mscale: float) -> float:
    """YaRN's factor of attention scores for a stretch by `factor`: 0.1 mscale ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


# The divisions of pairs over coordinates. Each takes the number of pairs and the sections, and returns `Divided`.


def contiguous(pairs: int, sections: tuple[int, ...]) -> Divided:
    """The first sections[0] pairs turn by coordinate 0, the next sections[1] by coordinate 1 (arXiv 2409.12191)."""
    _require_sections("contiguous", sections, pairs)
    coordinates = tuple(number for number, count in enumerate(sections) for _ in range(count))
    return coordinates, _exponents(pairs)


def alternating(pairs: int, sections: tuple[int, ...]) -> Divided:
    """Pairs turn by the coordinates 0, 1, 2, 0, 1, 2, ... in turn until a coordinate has its pairs (Qwen3-VL).

    Pairs behind those of a coordinate other than 0 turn by coordinate 0.
    """
    _require_sections("alternating", sections, pairs)
    number = len(sections)
    coordinates = tuple(pair % number if pair < number * sections[pair % number] else 0 for pair in range(pairs))
    counts = tuple(coordinates.count(coordinate) for coordinate in range(number))
    if counts != sections:
        raise ValueError(f"the division 'alternating' cannot give the coordinates {sections} of {pairs} pairs")
    return coordinates, _exponents(pairs)


def axial(pairs: int, sections: tuple[int, ...]) -> Divided:
    """Half of the pairs turn by coordinate 0, half by coordinate 1, each half with the frequencies of n / 2 pairs."""
    if pairs % 2 or sections:
        raise ValueError(f"the division 'axial' halves the pairs, so it takes no sections and no {pairs} pairs")
    half = pairs // 2
    return (0,) * half + (1,) * half, _exponents(half) * 2


def _exponents(pairs: int) -> tuple[float, ...]:
    return tuple(pair / pairs for pair in range(pairs))


def _require_sections(division: str, sections: tuple[int, ...], pairs: int) -> None:
    if not sections or min(sections) < 1 or sum(sections) != pairs:
        raise ValueError(f"the division '{division}' needs sections that sum to {pairs} pairs, not {list(sections)}")
