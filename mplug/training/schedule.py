"""Learning rate, weight decay and batch size as pure functions of the step (the first step is 1)."""

import math

from mplug.config.host_sections import BatchRampup, Schedule, Trainer, WeightDecay
from mplug.contracts.rates import RateSchedule, RateSettings
from mplug.registry.rates import RATES


def learning_rate(step: int, peak: float, schedule: Schedule, total_steps: int) -> float:
    """The rate of a step: a linear warm-up to `peak`, then the named schedule, never below min_lr."""
    warmup = schedule.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    entry: RateSchedule = RATES.load(schedule.name)
    settings = RateSettings(peak, min(schedule.min_lr, peak), warmup, schedule.decay_steps, total_steps)
    return max(settings.floor, entry(step, settings))


def weight_decay(step: int, start: float, schedule: WeightDecay, total_steps: int) -> float:
    """The weight decay of a step: from `start` to the schedule's `end` over the run."""
    if schedule.name == "constant" or schedule.end is None:
        return start
    return start + (schedule.end - start) * _shaped(schedule.name, _fraction(step, total_steps))


def batch_size(consumed_samples: int, trainer: Trainer, rampup: BatchRampup) -> int:
    """The global batch size after `consumed_samples`; a ramp-up has equal increments at equal intervals of samples."""
    if rampup.start is None or rampup.start >= trainer.global_batch_size:
        return trainer.global_batch_size
    increases = math.ceil((trainer.global_batch_size - rampup.start) / rampup.increment)
    done = increases if rampup.samples == 0 else consumed_samples * increases // rampup.samples
    return min(rampup.start + done * rampup.increment, trainer.global_batch_size)


def _fraction(part: int, whole: int) -> float:
    return min(max(part / whole, 0.0), 1.0)


def _shaped(name: str, fraction: float) -> float:
    return (1 - math.cos(math.pi * fraction)) / 2 if name == "cosine" else fraction
