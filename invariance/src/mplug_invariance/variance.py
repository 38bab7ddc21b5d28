"""List the parts of a run that depend on its layout, and check that no plugin bypasses a declared sum of gradients.

A strategy that does not sum gradients exactly (it compresses them to bf16, for example) declares this by the hook
`varies`, with the mesh axes over which it sums. No other strategy may then sum over these axes, and neither may the
host: the sum would differ from what `mplug explain` and the test suites state.
"""

from collections.abc import Iterator, Mapping

from mplug.errors import UsageError
from mplug.layout.names import role_of
from mplug.model.model import Model
from mplug.run.run import Run
from mplug_invariance.mixing import NAME


def layout_dependence(run: Run, model: Model) -> list[str]:
    """Why losses and gradients depend on the layout beyond rounding: a sentence per plugin, supplier and module.

    A module that does not declare what it mixes is listed as not known.
    """
    plugins = {
        f"{label}: {variance.reason} (relative error up to {variance.tolerance:.2g})"
        for label, variance in run.variances.items()
    }
    suppliers = {
        f"{filled.site.slot} of {filled.site.role} ({filled.supplier}): {reason}"
        for filled in model.slots
        if filled.offer and (reason := filled.offer.varies(filled.site, run))
    }
    modules = {
        f"{role_of(statement.name)}: {reason}"
        for statement in model.mixing
        if (reason := getattr(statement.module, "varies", ""))
    }
    unknown = {
        f"{role_of(statement.name)}: unknown, because {statement.kind} does not declare which axes it mixes (`{NAME}`)"
        for statement in model.mixing
        if statement.axes is None
    }
    return sorted(plugins | suppliers | modules | unknown)


def refuse_bypassing_layout(run: Run, model: Model) -> None:
    """Raise UsageError if the layout bypasses a declared sum; this check needs no processes.

    The plugin that shards optimizer states sums over all axes of its buckets. The gradient of a parameter that is
    gathered along an axis is summed over it before the sink receives it.
    """
    buckets = model.sharding.buckets if model.sharding is not None else ()
    summed = {axis for bucket in buckets for axis in (*bucket.axes, *bucket.copied)}
    for owner, axis in _declared(run):
        for label in run.hooks.implementers("shard_states") if axis in summed else ():
            if label != owner:
                raise _bypassed(run, owner, axis, label)
        gathered = [name for name, placement in model.placements.items() if placement.gathered_along == axis]
        if gathered:
            raise UsageError(
                f"{owner} declares that it sums gradients over the axis '{axis}' (Variance.sums), and another strategy "
                f"gathers '{gathered[0]}' along this axis, so its gradient is summed before {owner} receives it; "
                f"gather along other axes, or remove '{axis}' from the Variance.sums of {owner}"
            )


def refuse_bypassing(run: Run, model: Model, summers: Mapping[str, str]) -> None:
    """Raise UsageError if a plugin declares an axis, and the host or another plugin sums gradients over it.

    `summers` maps the axes in `sinks.reduced_over` to the labels of the plugins that sum over them; the host sums over
    all other axes.
    """
    for owner, axis in _declared(run):
        partial = [name for name in model.sinks if axis in model.placements[name].partial_axes]
        label = summers.get(axis)
        if label not in (None, owner):
            raise _bypassed(run, owner, axis, str(label))
        if partial and label is None and run.groups is not None:
            raise UsageError(
                f"{owner} declares that it sums gradients over the axis '{axis}' ({run.variances[owner].reason}), and "
                f"sinks.reduced_over lacks this axis, so the host would sum '{partial[0]}' in its own way; add "
                f"'{axis}' to sinks.reduced_over, or remove it from the Variance.sums of {owner}"
            )


def _declared(run: Run) -> Iterator[tuple[str, str]]:
    """(plugin, axis) for every declared axis with more than one rank."""
    for owner, variance in run.variances.items():
        yield from ((owner, axis) for axis in variance.sums if run.mesh.axes[axis].size > 1)


def _bypassed(run: Run, owner: str, axis: str, label: str) -> UsageError:
    return UsageError(
        f"layout '{run.config.parallel.layout}': {label} and {owner} would both sum gradients over the axis '{axis}', "
        f"and {owner} declares its own way of summing ({run.variances[owner].reason}); use a layout without "
        f"'{label.rpartition('/')[2]}' or without '{owner.rpartition('/')[2]}'"
    )
