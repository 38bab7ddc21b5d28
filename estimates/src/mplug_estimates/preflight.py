"""Compares a run with its machine before it starts (`mplug.training.preflight.Preflight`)."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from mplug_estimates.count_passes import passes_of
from mplug_estimates.course import data_gap, loss_warning
from mplug_estimates.default_kernels import about_default_kernels
from mplug_estimates.memory_check import check_memory
from mplug_estimates.passes import Passes
from mplug_estimates.settings import about_idle_gpus, about_unused, about_warmup
from mplug_estimates.size_limits import refuse_beyond_memory
from mplug_estimates.sizes import within_reason
from mplug_estimates.step_estimate import about_step, recipe_gaps
from mplug_estimates.unmet import about_unmet

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mplug.config.binding import RunConfig
    from mplug.config.sources import Settings
    from mplug.distributed.world import World
    from mplug.model.model import Model
    from mplug.model.slots.offers import Unmet
    from mplug.run.run import Run


class Preflight:
    """The class of the entry-point group 'mplug.preflights'."""

    def within_reason(self, config: "RunConfig", label: str) -> AbstractContextManager[None]:
        """In the block, refuse a model of sizes that no machine can hold."""
        return within_reason(config, label)

    def passes(self, model: "Model") -> "Mapping[str, Passes]":
        """The passes of a step of a whole model, without those that frozen parameters make unnecessary."""
        return passes_of(model)

    def about_settings(self, run: "Run", overrides: "Settings") -> list[str]:
        """Settings for plugins that the run does not use, and a run that ends within its warm-up."""
        return [*about_unused(run, overrides), *about_warmup(run)]

    def refuse(self, run: "Run", model: "Model", world: "World | None") -> None:
        """Refuse sizes that exceed all memory of the machine."""
        refuse_beyond_memory(run, model, world)

    def about_steps(self, run: "Run", model: "Model", world: "World | None", done: int) -> list[str]:
        """What a step is, how long it takes at least, and what makes it slower than it could be."""
        gaps = (*about_default_kernels(run, model), *recipe_gaps(run, world), *about_idle_gpus(run, world))
        return [about_step(run, model, world, done), *gaps]

    def about_memory(self, run: "Run", model: "Model", world: "World | None") -> list[str]:
        """Compare the estimate of the run's memory with that of the machine."""
        return check_memory(run, model, world)

    def about_unmet(self, run: "Run", unmet: "Sequence[Unmet]") -> list[str]:
        """Try every installed kernel plugin in a process of its own."""
        return about_unmet(run, unmet)

    def data_gap(self, run: "Run", samples: int | None) -> list[str]:
        """A warning if a step takes more samples than the training data hold."""
        return data_gap(run, samples)

    def loss_warning(self, loss: float | None, vocab_size: int) -> list[str]:
        """A warning if the last loss of a run is far above that of a model that knows nothing."""
        return loss_warning(loss, vocab_size)
