"""What of a run depends on the layout, in words: of everything else the losses are the same to rounding under any."""

from mplug.model import Model, role_of
from mplug.run import Run


def variance(run: Run, model: Model) -> list[str]:
    """What of this rank's part of a model depends on the layout: suppliers and modules that say so, and why."""
    reasons = {
        f"{filled.site.slot} of {filled.site.role} ({filled.supplier}): {reason}"
        for filled in model.slots
        if filled.offer and (reason := filled.offer.varies(filled.site, run))
    } | {
        f"{role_of(name)}: {reason}"
        for name, module in model.module.named_modules()
        if (reason := getattr(module, "varies", ""))
    }
    return sorted(reasons)


def variance_of_all(run: Run, model: Model) -> tuple[str, ...]:
    """The same of all ranks' parts; all ranks must ask."""
    return tuple(sorted({reason for reasons in run.gathered(variance(run, model)) for reason in reasons}))
