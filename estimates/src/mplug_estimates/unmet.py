"""What to do about needs that the chosen plugins do not meet."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mplug.model.slots.kernel_limits import NO_GPU
from mplug.model.slots.offers import PLAIN
from mplug_estimates.alternatives import kernels_that_would_do

if TYPE_CHECKING:
    from mplug.config.binding import RunConfig
    from mplug.model.slots.offers import Unmet
    from mplug.run.run import Run


def about_unmet(run: "Run", unmet: "Sequence[Unmet]") -> list[str]:
    """The lines of an error: each need once, with the kernels that would do."""
    if lines := _missing_gpu(run, unmet):
        return lines
    different = {str(one): one for one in unmet}
    representatives = {(u.plugin, u.kind): u for u in different.values()}  # trying a kernel costs one process
    remedies = {key: _remedy(run.config, one) for key, one in representatives.items()}
    return [f"{text}{remedies[u.plugin, u.kind]}" for text, u in different.items()]


def _missing_gpu(run: "Run", unmet: "Sequence[Unmet]") -> list[str]:
    """The error lines of a run on the CPU that only a GPU could serve; empty if the kernels lack something else.

    Without a GPU, no other kernel is searched for: the search takes a minute, and would hide the cause.
    """
    if run.device != "cpu":
        return []
    cause = "trainer.device=cpu" if run.config.trainer.device == "cpu" else "torch finds no GPU on this machine"
    without = {one.plugin: one for one in reversed(unmet) if NO_GPU in one.reason}
    if without:
        return [f"{one} ({cause}); leave the kernel out here" for one in without.values()]
    recipe = run.precision.recipe
    plain = [one for one in unmet if one.plugin == PLAIN and recipe is not None and recipe.need in one.site.needs]
    if recipe is not None and plain:
        return [
            f"{plain[0]}; this run is on the CPU ({cause}): use --precision bf16 here, or name a kernel that computes "
            f"the recipe '{recipe.name}' on a CPU, slowly: kernels.{plain[0].kind}=NAME"
        ]
    return []


def _remedy(config: "RunConfig", unmet: "Unmet") -> str:
    """The end of a line: the kernels to use instead; empty if a plugin of another kind has the need."""
    is_kernel = unmet.plugin == PLAIN or unmet.plugin in config.kernels.plugins
    return kernels_that_would_do(config, unmet) if is_kernel else ""
