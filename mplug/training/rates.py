"""Learning rates after the warm-up, as functions of the step: the host's entries of `mplug.registry.rates.RATES`."""

import math

from mplug.contracts.rates import RateSettings, ends_with_run


def constant(step: int, settings: RateSettings) -> float:
    """The peak."""
    return settings.peak


def linear(step: int, settings: RateSettings) -> float:
    """A straight line from the peak to the minimum."""
    return settings.between(1 - settings.after_warmup(step))


def cosine(step: int, settings: RateSettings) -> float:
    """Half a period of a cosine from the peak to the minimum (arXiv 1608.03983)."""
    return settings.between(1 - _cosine(settings.after_warmup(step)))


def inverse_sqrt(step: int, settings: RateSettings) -> float:
    """The peak times sqrt(warm-up / step) (arXiv 1706.03762, 5.3)."""
    return settings.peak * math.sqrt(max(settings.warmup_steps, 1) / step)


@ends_with_run
def wsd(step: int, settings: RateSettings) -> float:
    """The peak, and a straight line to the minimum at the end of the run (arXiv 2404.06395)."""
    return settings.between(1 - settings.at_the_end(step))


@ends_with_run
def wsd_sqrt(step: int, settings: RateSettings) -> float:
    """The peak, and at the end of the run a fall by the square root of the part that is done (arXiv 2405.18392)."""
    return settings.between(1 - math.sqrt(settings.at_the_end(step)))


@ends_with_run
def wsd_cosine(step: int, settings: RateSettings) -> float:
    """The peak, and half a period of a cosine to the minimum at the end of the run."""
    return settings.between(1 - _cosine(settings.at_the_end(step)))


def _cosine(part: float) -> float:
    return (1 - math.cos(math.pi * part)) / 2
