"""What all ranks must have alike: stages, tables of actions, and the axes over which strategies sum gradients."""

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from itertools import combinations

from mplug.errors import RunError, UsageError, listed
from mplug.model.invariance import Summing
from mplug.model.model import Model
from mplug.run.record import provenance
from mplug.run.run import Run


def refuse_other_plugins(run: Run) -> None:
    """Raise RunError unless every rank has the same plugins, in the same versions and order."""
    keys = ("plugin", "distribution", "version")
    plugins = run.gathered([[plugin[key] for key in keys] for plugin in provenance(run)["plugins"]])
    for rank, of_rank in enumerate(plugins):
        if of_rank != plugins[0]:
            raise RunError(
                f"rank {rank} has the plugins {of_rank}, and rank 0 has {plugins[0]}; install the same versions of the "
                f"same plugins on all machines"
            )


def refuse_other_stages(run: Run, model: Model) -> None:
    """Raise UsageError on all ranks unless they have the same chunks of units and the same tables of actions.

    Every rank computes these itself. Receives take what arrives, so ranks with different tables would exchange the
    activations of different micro batches.
    """
    stages = model.stages
    if not stages.axis:
        return
    digest = blake2b(repr((stages.units, stages.backward, stages.ranks)).encode(), digest_size=16)
    if stages.table is not None:
        for number in run.micro_batch_counts():
            for row in stages.table(number).rows:
                digest.update(" ".join(map(str, row)).encode())
    digests = run.gathered(digest.hexdigest())
    for rank, own in enumerate(digests):
        if own != digests[0]:
            (label,) = run.hooks.implementers("build_pipeline")
            schedule = f", or its schedule '{stages.schedule}'," if stages.schedule else ""
            raise UsageError(
                f"{label}{schedule} gives rank {rank} other stages or another order of actions than rank 0; their "
                f"functions must return the same on every rank (the order of a Python set differs between processes)"
            )


def refuse_two_steppers(run: Run, model: Model) -> None:
    """Raise UsageError if a plugin replaces the stepper of a model that another has divided into stages."""
    others = run.hooks.implementers("build_stepper")
    if model.pipeline is not None and others:
        (pipeline,) = run.hooks.implementers("build_pipeline")
        raise UsageError(
            f"{pipeline} runs the step of its stages ('build_pipeline'), and {listed(others)} replaces the step "
            f"('build_stepper'); use only one of them"
        )


def refuse_races(model: Model, summing: Iterable[Summing]) -> None:
    """Raise UsageError if two strategies sum the same buffers, which would be a race."""
    trained = {name: one for name, one in model.placements.items() if one.parameter.trainable}
    found = []
    for one in summing:
        summed = {name for name, placement in trained.items() if one.axes.intersection(placement.partial_axes)}
        found.append((listed(sorted(one.axes)), summed or set(trained)))
    for (axes, summed), (others, theirs) in combinations(found, 2):
        if summed & theirs:
            raise UsageError(
                f"the strategies of the mesh axes {axes} and {others} both sum gradients during backward in the same "
                f"buffers; use a layout with one of them"
            )


def refuse_other_axes(run: Run, summers: Mapping[str, str]) -> None:
    """Raise UsageError on all ranks if they name different axes in `sinks.reduced_over`: their sums would never match.

    `summers` maps each named axis to the label of the plugin that names it.
    """
    found = run.gathered(sorted(summers.items()))
    for rank, named in enumerate(found):
        for axis, label in set(named) ^ set(found[0]):
            naming, silent = (rank, 0) if (axis, label) in named else (0, rank)
            raise UsageError(
                f"{label} names the axis '{axis}' in sinks.reduced_over on rank {naming}, and not on rank "
                f"{silent}; it must name the axes of all trained parameters of the model (model.placements) that it "
                f"sums, also of parameters in other pipeline stages"
            )
