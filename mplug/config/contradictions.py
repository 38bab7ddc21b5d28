"""Settings of the host that contradict each other, whatever plugins the run has."""

from collections.abc import Iterator

from mplug.config.binding import RunConfig
from mplug.config.sources import Key, source_of


def contradictions(config: RunConfig) -> Iterator[str]:
    """A sentence for each contradiction, with the fields as the user writes them and where they were set."""
    trainer, schedule, rampup = config.trainer, config.schedule, config.schedule.batch_rampup

    def named(*fields: str) -> str:
        keys: list[Key] = [tuple(field.split(".")) for field in fields]
        sources = dict.fromkeys(filter(None, (source_of(config.settings, key) for key in keys)))
        return f"{fields[0]} ({', '.join(sources)})" if sources else fields[0]

    if rampup.start is not None and rampup.start > trainer.global_batch_size:
        yield (
            f"{named('schedule.batch_rampup.start', 'trainer.global_batch_size')}: the ramp starts at {rampup.start} "
            f"samples, above trainer.global_batch_size={trainer.global_batch_size}; start below it"
        )
    if schedule.name == "wsd" and schedule.decay_steps is not None and schedule.decay_steps > trainer.steps:
        yield (
            f"{named('schedule.decay_steps', 'trainer.steps')}: the decay of {schedule.decay_steps} steps is longer "
            f"than the run, whose last steps it takes: trainer.steps={trainer.steps}; shorten the decay"
        )
    lr = getattr(config.optimizer, "lr", None)
    if isinstance(lr, float) and schedule.name != "constant" and schedule.min_lr > lr:
        yield (
            f"{named('schedule.min_lr', 'optimizer.lr')}: the least rate {schedule.min_lr:g} is above the peak "
            f"optimizer.lr={lr:g}; take a smaller one"
        )
