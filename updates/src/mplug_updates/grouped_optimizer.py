"""The optimizer of a run with one for each group of parameters (`optimizer.groups`), of any plugin."""

from typing import TYPE_CHECKING

from mplug.contracts.optimizer import Optimizer, Piece
from mplug.errors import UsageError, listed
from mplug.model.assembler import Assembler
from mplug.model.single_optimizer import placements_of, wrapped
from mplug.registry.hooks import implemented
from mplug_updates.averaged_optimizer import with_average
from mplug_updates.builders import builder, optimizer_of
from mplug_updates.first_weights import with_first_weights
from mplug_updates.grouping import FIELD
from mplug_updates.offloaded_optimizer import Chunk, OffloadedOptimizer, chunks_of
from mplug_updates.optimizer_parts import UNCHANGED, GroupedOptimizer, Part, Rate
from mplug_updates.widths import width_rates

if TYPE_CHECKING:
    from mplug.config.binding import RunConfig
    from mplug.config.host_sections import ParameterGroup
    from mplug.distributed.groups import Groups
    from mplug.model.model import Model
    from mplug.run.run import Run

FOR_WHOLE_RUNS = ("state", "build_stepper", "wrap_model", "shard_states")
"""Hooks by which a plugin does more for a run than what the optimizers do that it has built."""


def build_optimizer(run: "Run", model: "Model", pieces: list[Piece], groups: "Groups | None" = None) -> Optimizer:
    """The optimizer of these pieces, whose groups, averages and first weights are those of the config and the plan.

    With `groups`, its collectives can run; a build without memory has none. Collective with groups.
    """
    optimizer = wrapped(run, model, _without_first_weights(run, model, pieces, groups), pieces)
    return with_first_weights(run, model, optimizer, pieces)


def _without_first_weights(run: "Run", model: "Model", pieces: list[Piece], groups: "Groups | None") -> Optimizer:
    placements = placements_of(model, pieces)
    everywhere = {name: one for name, one in model.placements.items() if one.parameter.trainable}
    factors = width_rates(run, model)
    offload = run.config.offload
    chunks = {} if offload is None else chunks_of(everywhere, offload.chunk)
    keys = {name: (chunks.get(name, 0), model.groups.get(name, -1), factors.get(name, 1.0)) for name in everywhere}
    whole = (0, -1, 1.0)
    kinds = sorted({whole, *((0, number, 1.0) for number in range(len(run.config.groups))), *keys.values()})
    parts: list[Part] = []
    offloaded: list[Chunk] = []
    for kind in kinds:
        _, number, factor = kind
        group = run.config.groups[number] if number >= 0 else None
        own = [piece for piece in pieces if keys[piece.name] == kind]
        held = {name: one for name, one in placements.items() if keys[name] == kind}
        assembler = Assembler(run, held, tuple(one for name, one in everywhere.items() if keys[name] == kind), groups)
        # An optimizer may have collectives, so every rank builds and runs all of them, also those without pieces.
        optimizer = with_average(run, optimizer_of(run, own, assembler, group), own)
        lr, decay = (UNCHANGED, UNCHANGED) if group is None else rates_of(run.config, group)
        # By widths, the product of the learning rate and the decay is that of the base model.
        parts.append(Part(optimizer, own, lr.times(factor), decay.times(1 / factor)))
        if offload is not None:
            offloaded.append(Chunk(parts[-1]))  # whose states leave the device before the next ones are made
    if offloaded:
        return OffloadedOptimizer(offloaded)
    return parts[0].optimizer if kinds == [whole] else GroupedOptimizer(parts)


def refuse_single(run: "Run", model: "Model") -> None:
    """Raise UsageError if parameters have several optimizers, and a plugin may not be able to build several.

    They have if the config has groups, or the plan a base model of other widths.
    """
    factors = width_rates(run, model)
    if not (run.config.groups or factors or run.config.offload):
        return
    label = builder(run, None)
    kept = {label: [hook for hook in FOR_WHOLE_RUNS if label in run.hooks.implementers(hook)]}
    for group in run.config.groups:
        if group.optimizer is not None:
            has = implemented(group.optimizer.plugin)
            kept.setdefault(group.optimizer.label, [hook for hook in FOR_WHOLE_RUNS if hook in has])
            rates_of(run.config, group)
    what, remedy = f"{FIELD} needs", "remove the groups"
    if not run.config.groups:
        what, remedy = "parameters of other widths than in the base model need", "remove model.mup_base"
        if not factors:
            what, remedy = "optimizer.offload needs", "remove the field"
    for label, hooks in kept.items():
        if hooks:
            raise UsageError(
                f"{what} an optimizer for each group, and {label} keeps something for the whole run (the hook "
                f"{listed(map(repr, hooks))}); {remedy}, or use another optimizer"
            )


def rates_of(config: "RunConfig", group: "ParameterGroup") -> "tuple[Rate, Rate]":
    """The learning rate and the weight decay of a group, from those of the run at each step.

    UsageError if the weight decay of the run begins at 0 and changes, so that a factor on it cannot be that of the
    group's own optimizer.
    """
    if group.optimizer is None:
        return Rate(group.lr_scale), Rate(group.weight_decay_scale)
    own, whole = group.optimizer.config, config.optimizer
    lr = Rate(group.lr_scale * (own.lr / whole.lr))
    decay = own.weight_decay * group.weight_decay_scale
    if whole.weight_decay:
        return lr, Rate(decay / whole.weight_decay)
    if decay and config.schedule.weight_decay.end is not None:
        raise UsageError(
            f"{FIELD}: schedule.weight_decay changes optimizer.weight_decay=0 over the run, and so gives no factor for "
            f"the weight decay {decay:g} of {group.optimizer.label}; set optimizer.weight_decay above 0"
        )
    return lr, Rate(0.0, added=decay)
