"""Lines about kernels of a list (`kernels.default`) that do less than a user may expect."""

from typing import TYPE_CHECKING

from mplug.config.defaults import default_settings
from mplug.errors import listed

if TYPE_CHECKING:
    from mplug.model.model import Model
    from mplug.model.slots.offers import Filled
    from mplug.run.run import Run

UNMEASURED = "it does not compete: nothing has measured it on this GPU"


def about_default_kernels(run: "Run", model: "Model") -> list[str]:
    """What plain torch computes with all pairs of positions in memory on a GPU, and kernels that fill nothing."""
    return [*_in_plain_torch(run, model), *_without_rate(run, model)]


def _in_plain_torch(run: "Run", model: "Model") -> list[str]:
    """A line for each kind of slots: their modules, what each kernel lacks, and what to set.

    A single default kernel is refused there; one of several gives way to plain torch.
    """
    kernels, modules, reasons = run.config.kernels, dict[str, dict[str, None]](), dict[str, dict[str, str]]()
    if run.device != "cuda" or not kernels.rivals:
        return []
    for filled in model.slots:
        kind = filled.site.kind
        if filled.offer is None and filled.site.declared.keeps_pairs and kind not in kernels.kinds:
            modules.setdefault(kind, {})[filled.site.role] = None
            for plugin in kernels.rivals:
                reasons.setdefault(kind, {}).setdefault(_name(plugin), reason_against(filled, plugin) or UNMEASURED)
    return [
        f"plain torch computes the {kind} of {', '.join(roles)}, with all pairs of positions in memory "
        f"({'; '.join(f'{name}: {reason}' for name, reason in reasons[kind].items())}); name a kernel that serves it "
        f"(kernels.{kind}=NAME, docs/kernels.md), or set kernels.{kind}=null to keep plain torch"
        for kind, roles in modules.items()
    ]


def _without_rate(run: "Run", model: "Model") -> list[str]:
    """A line about kernels of another list than the usual one that compete for no slot."""
    kernels, usual = run.config.kernels, default_settings()["kernels", "default"].value
    competing = {offer.plugin for filled in model.slots for offer, _ in filled.rivals}
    idle = [_name(plugin) for plugin in kernels.rivals if plugin not in competing]
    none_may = not competing and bool(kernels.kinds)  # the slots for which they compete have kernels of their own
    if [*map(_name, kernels.rivals)] == usual or none_may or not idle:
        return []
    one = len(idle) == 1
    return [
        f"{listed(idle)} of kernels.default {'competes' if one else 'compete'} for no slot of this model, because "
        f"{'it declares' if one else 'they declare'} no rate for one on this device; name {'it' if one else 'one'} "
        f"for a kind of slots instead (kernels.KIND={idle[0]})"
    ]


def reason_against(filled: "Filled", plugin: str) -> str:
    """What a default kernel that competed for a site lacks; empty if it gave no reason or did not compete."""
    return next((answer for offer, answer in filled.rivals if offer.plugin == plugin and isinstance(answer, str)), "")


def _name(plugin: str) -> str:
    return plugin.rpartition("/")[2]
