"""Steps of a token that a compiler has compiled, and those that a CUDA graph can replay."""

from collections.abc import Iterator

from torch import nn

from mplug import Run
from mplug.commands import AS_THEY_ARE, Instead
from mplug_compile import compiled_units, compiler_of
from mplug_graphs import forward_obstacles
from mplug_sampling.sampler import Sampler, owners_of_axes

OF_TRAINING = ("data", "objectives")
"""Kinds of plugins that take part in a step of training, and in none of sampling."""


def obstacles(run: Run, sampler: Sampler) -> list[str]:
    """The reasons, as clauses, why no CUDA graph can replay the step of a token; empty if one can."""
    if not run.device.startswith("cuda"):
        return ["the run is on the CPU"]
    of_layout = layout_obstacles(run, sampler)
    if sampler.eager_because:
        return [*of_layout, sampler.eager_because]
    if _gathers(run, sampler):
        return of_layout
    return [*of_layout, *forward_obstacles(run, sampler.model, OF_TRAINING if run.trains else ())]


def layout_obstacles(run: Run, sampler: Sampler) -> list[str]:
    """Those of the reasons that the layout gives, which are known before slots are filled."""
    gathered = ["the weights are gathered for each rollout, so they have other addresses in each"]
    return [*_of_exchanges(run), *(gathered if _gathers(run, sampler) else ())]


def _gathers(run: Run, sampler: Sampler) -> bool:
    return run.trains and any(placement.gathered_along for placement in sampler.model.placements.values())


def _of_exchanges(run: Run) -> Iterator[str]:
    """Mesh axes whose ranks exchange activations; ranks that only divide the batch do not."""
    owners = owners_of_axes(run)
    for axis in run.mesh.axes.values():
        ranks, degree = f"the ranks of {owners.get(axis.name, 'the layout')}", f"({axis.name}={axis.size})"
        if axis.size == 1 or (set(axis.entries) == {"batch"} and not axis.splits and not axis.activations):
            continue
        if axis.entries:  # when they sample, they divide the prompts
            yield f"{ranks} divide positions in training {degree}, beside which graphs have not been tested"
        else:
            yield f"{ranks} exchange activations {degree}"


def compiled_step(run: Run, sampler: Sampler) -> tuple[Instead, str]:
    """(the inference units as compiled functions, by their names; why there are none although the run asks for them).

    Every token of a cache that grows has other shapes, so its steps are not compiled. A unit whose module has hooks
    stays eager, because a call of its method would omit them.
    """
    trainer = run.config.trainer
    if trainer.compile == "never":
        return AS_THEY_ARE, ""
    if sampler.eager_because:
        return AS_THEY_ARE, sampler.eager_because
    backend = compiler_of(run)
    if backend is None:
        return AS_THEY_ARE, f"trainer.compile={trainer.compile} compiles nothing on this machine's {run.device.upper()}"
    model = sampler.model
    units = [
        unit
        for unit in model.plan.without_streams(model.plan.inference)
        if not _has_hooks(model.module.get_submodule(unit.name))
    ]
    found = compiled_units(model, units, backend, trainer.tune_kernels, sampler.own_units())
    return {unit.name: compiled for unit, compiled in found}, ""


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
