"""The tables of what updates the parameters: optimizers, their rates and schedule, and averages."""

from typing import TYPE_CHECKING

from mplug.commands import table

if TYPE_CHECKING:
    from mplug import Run


def updates(run: "Run") -> str:
    """The optimizer of the run, its learning rate and schedule, and the average of the weights that the host keeps."""
    config = run.config
    optimizer, schedule, kept = config.optimizer, config.schedule, config.average
    average = "-"
    if kept is not None:
        form = "mean" if kept.decay is None else f"decay {kept.decay:g}"
        average = f"{form}, from update {kept.start}" if kept.start else form
    (label,) = run.hooks.implementers("build_optimizer")
    decay = "default" if schedule.decay_steps is None else schedule.decay_steps
    row = (label, f"{optimizer.lr:g}", f"{optimizer.weight_decay:g}", schedule.name, schedule.warmup_steps, decay)
    header = (
        "OPTIMIZER",
        "LR",
        "WEIGHT DECAY",
        "SCHEDULE",
        "WARM-UP STEPS",
        "DECAY STEPS",
        "MIN LR",
        "OPTIMIZER.AVERAGE",
    )
    return table(header, [(*row, f"{schedule.min_lr:g}", average)])


def rates(run: "Run", number: int, factor: float) -> str:
    """The rates of a group of `optimizer.groups`: factors, or the optimizer with its own learning rate and decay.

    `factor` is that of the learning rate by the width (`rate_of_width`).
    """
    by_width = "" if factor == 1 else f"by width: lr x {factor:g}, decay x {1 / factor:g}"
    if number < 0:
        return by_width or "-"
    return "; ".join(filter(None, (_rates_of_group(run, number), by_width)))


def _rates_of_group(run: "Run", number: int) -> str:
    group = run.config.groups[number]
    if group.optimizer is None:
        return f"group {number}: lr x {group.lr_scale:g}, decay x {group.weight_decay_scale:g}"
    own = group.optimizer.config
    lr, decay = group.lr_scale * own.lr, group.weight_decay_scale * own.weight_decay
    return f"group {number}: {group.optimizer.name}, lr {lr:g}, decay {decay:g}"
