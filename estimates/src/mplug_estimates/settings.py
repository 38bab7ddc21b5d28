"""Lines about settings of a run that are valid and do less than they seem to. Imports no torch."""

from typing import TYPE_CHECKING

from mplug.config.binding import FREE_SECTIONS, PLUGIN_SECTIONS
from mplug.errors import listed

if TYPE_CHECKING:
    from mplug.config.sources import Settings
    from mplug.distributed.world import World
    from mplug.run.run import Run


def about_warmup(run: "Run") -> list[str]:
    """A line about a run that ends within its warm-up."""
    schedule, steps, peak = run.config.schedule, run.config.trainer.steps, run.config.optimizer.lr
    if schedule.warmup_steps <= steps:
        return []
    return [
        f"the warm-up has {schedule.warmup_steps} steps and the run {steps}, so the learning rate only reaches "
        f"{peak * steps / schedule.warmup_steps:.2g} of {peak:g}; set schedule.warmup_steps to fewer"
    ]


def about_idle_gpus(run: "Run", world: "World | None") -> list[str]:
    """A line about GPUs of this machine that the run does not use, unless a launcher has started its processes."""
    if run.config.trainer.device == "cpu" or world is not None:
        return []
    from torch.cuda import device_count

    if (gpus := device_count()) <= run.mesh.world_size:
        return []
    data = run.config.parallel.data
    remedy = f"--parallel {data}{gpus} uses all" if data else "add a parallel strategy to use more"
    return [f"this machine has {gpus} GPUs, and the run uses {run.mesh.world_size}; {remedy}"]


def about_unused(run: "Run", overrides: "Settings") -> list[str]:
    """Lines about settings of the user for plugins that the run does not use, such as a strategy outside the layout.

    They are valid, because a file may hold the settings of several layouts.
    """
    used = {one.section for one in run.config.chosen}
    used |= {rest.section for rest in (run.config.parallel.rest,) if rest is not None}
    unused: dict[tuple[str, str], list[str]] = {}
    for key, setting in overrides.items():
        is_field = len(key) > 2 and key[0] in PLUGIN_SECTIONS and key[0] not in FREE_SECTIONS
        if is_field and key[:2] not in used:
            unused.setdefault((key[0], key[1]), []).append(f"{'.'.join(key)} ({setting.source})")
    return [
        f"{listed(fields)} {'has' if len(fields) == 1 else 'have'} no effect: the run does not use {section}/{name}"
        for (section, name), fields in unused.items()
    ]
