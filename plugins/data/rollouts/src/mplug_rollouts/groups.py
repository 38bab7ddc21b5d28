"""The completions of prompts with their rewards, and how much better each is than others of its prompt."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from mplug_rollouts.config import Scale

EPSILON = 1e-4
"""Added to a standard deviation, as in TRL."""


@dataclass(frozen=True)
class Item:
    """A completion to train on: its tokens after those of its prompt, and the log-probabilities of its tokens."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    reward: float
    advantage: float = 0.0
    truncated: bool = False

    def as_plain(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @staticmethod
    def of_plain(value: dict[str, Any]) -> "Item":
        """The item of `as_plain`."""
        return Item(**{name: tuple(one) if isinstance(one, list) else one for name, one in value.items()})


def advantages(rewards: Sequence[Sequence[float]], scale: Scale) -> list[list[float]]:
    """The advantages of the completions of each prompt, by their rewards (GRPO, arXiv 2402.03300, section 4.1.2).

    A reward that is missing (NaN) counts in no mean, and has the advantage 0.
    """
    known = [[one for one in group if not math.isnan(one)] for group in rewards]
    everywhere = _deviation([one for group in known for one in group])
    found = []
    for group, own in zip(rewards, known, strict=True):
        mean = fmean(own) if own else 0.0
        divisor = {"group": _deviation(own) + EPSILON, "batch": everywhere + EPSILON, "none": 1.0}[scale]
        found.append([0.0 if math.isnan(one) else (one - mean) / divisor for one in group])
    return found


def is_flat(rewards: Iterable[float]) -> bool:
    """Whether the known rewards of a prompt are equal, so that its completions teach nothing."""
    return len({one for one in rewards if not math.isnan(one)}) < 2


def _deviation(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def mean_of(values: Iterable[float]) -> float:
    """The mean of the known values; 0 if there are none."""
    known = [one for one in values if not math.isnan(one)]
    return fmean(known) if known else 0.0


def deviation_of(values: Iterable[float]) -> float:
    """The standard deviation of the known values."""
    return _deviation([one for one in values if not math.isnan(one)])
