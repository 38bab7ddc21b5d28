"""Contradictions between settings of the host. No chosen plugin decides them."""

from collections.abc import Iterator

from mplug.config.binding import RunConfig
from mplug.config.sources import Key, source_of
from mplug.contracts.rates import RateSchedule


def contradictions(config: RunConfig, rate: RateSchedule) -> Iterator[str]:
    """One message per contradiction, with the fields as the user writes them and their sources.

    `rate` is the learning rate schedule that the config names.
    """
    trainer, schedule, rampup = config.trainer, config.schedule, config.schedule.batch_rampup

    def field_with_sources(*fields: str) -> str:
        keys: list[Key] = [tuple(field.split(".")) for field in fields]
        sources = dict.fromkeys(filter(None, (source_of(config.settings, key) for key in keys)))
        return f"{fields[0]} ({', '.join(sources)})" if sources else fields[0]

    if rampup.start is not None and rampup.start > trainer.global_batch_size:
        yield (
            f"{field_with_sources('schedule.batch_rampup.start', 'trainer.global_batch_size')}: the ramp-up starts at "
            f"{rampup.start} samples, which is more than trainer.global_batch_size={trainer.global_batch_size}; set "
            f"schedule.batch_rampup.start to a smaller value"
        )
    ends_with_run = getattr(rate, "ends_with_run", False)
    if ends_with_run and schedule.decay_steps is not None and schedule.decay_steps > trainer.steps:
        yield (
            f"{field_with_sources('schedule.decay_steps', 'trainer.steps')}: the decay of {schedule.decay_steps} steps "
            f"is longer than the run (trainer.steps={trainer.steps}); set schedule.decay_steps to at most that number"
        )
    lr = getattr(config.optimizer, "lr", None)
    if isinstance(lr, float) and schedule.name != "constant" and schedule.min_lr > lr:
        yield (
            f"{field_with_sources('schedule.min_lr', 'optimizer.lr')}: the minimum learning rate {schedule.min_lr:g} "
            f"is above the peak optimizer.lr={lr:g}; set schedule.min_lr to a smaller value"
        )
