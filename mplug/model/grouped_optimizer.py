"""The optimizer of a run: one, or one for each group of parameters (`optimizer.groups`), of any plugin."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from mplug.config.host_sections import ParameterGroup
from mplug.contracts.optimizer import Optimizer, Piece, ShapedState, StepScalars
from mplug.errors import PluginError, UsageError, listed
from mplug.layout.placement import Placement
from mplug.model.assembler import Assembler
from mplug.model.averaged_optimizer import with_average
from mplug.model.first_weights import with_first_weights
from mplug.model.plans.grouping import FIELD
from mplug.registry.hooks import implemented

if TYPE_CHECKING:
    from mplug.config.binding import RunConfig
    from mplug.distributed.groups import Groups
    from mplug.model.model import Model
    from mplug.run.run import Run

HOOK = "build_optimizer"
FOR_WHOLE_RUNS = ("state", "build_stepper", "wrap_model", "shard_states")
"""Hooks by which a plugin does more for a run than what the optimizers do that it has built."""


def build_optimizer(run: "Run", model: "Model", pieces: list[Piece], groups: "Groups | None" = None) -> Optimizer:
    """The optimizer of these pieces; PluginError if the plugin returns another object.

    With `groups`, its collectives can run; a build without memory has none. Collective with groups.
    """
    averaged = with_average(run, _without_average(run, model, pieces, groups), pieces)
    return with_first_weights(run, model, averaged, pieces)


def _without_average(run: "Run", model: "Model", pieces: list[Piece], groups: "Groups | None") -> Optimizer:
    placements = _placements(model, pieces)
    everywhere = {name: one for name, one in model.placements.items() if one.parameter.trainable}
    if not run.config.groups:
        return single_optimizer(run, pieces, Assembler(run, placements, tuple(everywhere.values()), groups))
    parts = []
    for number, group in enumerate((None, *run.config.groups), start=-1):

        def is_own(name: str, number: int = number) -> bool:
            return model.groups.get(name, -1) == number

        own = [piece for piece in pieces if is_own(piece.name)]
        held = {name: one for name, one in placements.items() if is_own(name)}
        assembler = Assembler(run, held, tuple(one for name, one in everywhere.items() if is_own(name)), groups)
        # An optimizer may have collectives, so every rank builds and runs all of them, also those without pieces.
        optimizer = single_optimizer(run, own, assembler, group)
        parts.append(Part(optimizer, own, *((UNCHANGED, UNCHANGED) if group is None else rates_of(run.config, group))))
    return GroupedOptimizer(parts)


def _placements(model: "Model", pieces: list[Piece]) -> dict[str, Placement]:
    """The placements of the parts that this rank and others own of each parameter of this rank's stage."""
    own = {piece.name: piece.placement for piece in pieces}
    sharding, found = model.sharding, {}
    for name, parameter in model.parameters().items():
        if parameter.requires_grad:
            whole = model.placements[name]
            shard = whole if sharding is None or name not in sharding.of else sharding.placed(whole)
            found[name] = own.get(name, shard)
    return found


def builder(run: "Run", group: ParameterGroup | None) -> str:
    """The label of the plugin that builds the optimizer of a group, or of the parameters without a group (None)."""
    if group is not None and group.optimizer is not None:
        return group.optimizer.label
    (label,) = run.hooks.implementers(HOOK)
    return label


def builder_of(run: "Run", model: "Model", name: str) -> str:
    """The label of the plugin that builds the optimizer of a parameter."""
    number = model.groups.get(name, -1)
    return builder(run, run.config.groups[number] if number >= 0 else None)


def single_optimizer(
    run: "Run", pieces: list[Piece], assembler: Assembler, group: ParameterGroup | None = None
) -> Optimizer:
    """What the plugin builds of the pieces of a group alone; PluginError if it is no optimizer."""
    call: Callable[..., object] = run.hooks.call.build_optimizer
    if group is not None and group.optimizer is not None:
        call = partial(group.optimizer.call, HOOK)
    optimizer: object = call(run=run, pieces=pieces, assembler=assembler)
    if not isinstance(optimizer, Optimizer):
        label, returned = builder(run, group), type(optimizer).__name__
        raise PluginError(f"build_optimizer of {label} returns '{returned}', which is not derived from mplug.Optimizer")
    return optimizer


def refuse_single(run: "Run") -> None:
    """Raise UsageError if the config has groups, and a plugin may not be able to build several optimizers."""
    if not run.config.groups:
        return
    label = builder(run, None)
    kept = {label: [hook for hook in FOR_WHOLE_RUNS if label in run.hooks.implementers(hook)]}
    for group in run.config.groups:
        if group.optimizer is not None:
            has = implemented(group.optimizer.plugin)
            kept.setdefault(group.optimizer.label, [hook for hook in FOR_WHOLE_RUNS if hook in has])
            rates_of(run.config, group)
    for label, hooks in kept.items():
        if hooks:
            raise UsageError(
                f"{FIELD} needs an optimizer for each group, and {label} keeps something for the whole run (the hook "
                f"{listed(map(repr, hooks))}); remove the groups, or use another optimizer"
            )


def rates_of(config: "RunConfig", group: ParameterGroup) -> "tuple[Rate, Rate]":
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


class Rate(NamedTuple):
    """A rate of a group: `factor` times that of the run, plus `added`."""

    factor: float = 1.0
    added: float = 0.0

    def of(self, rate: Tensor) -> Tensor:
        """The rate [] of the group, rounded once."""
        return rate if self == UNCHANGED else (rate.double() * self.factor + self.added).to(rate.dtype)


UNCHANGED = Rate()


class Part(NamedTuple):
    """The optimizer of a group, its pieces on this rank, and its rates."""

    optimizer: Optimizer
    pieces: Sequence[Piece]
    lr: Rate
    weight_decay: Rate

    def step(self, scalars: StepScalars) -> None:
        """Update the pieces of the group once."""
        lr, weight_decay = self.lr.of(scalars.lr), self.weight_decay.of(scalars.weight_decay)
        self.optimizer.step(replace(scalars, lr=lr, weight_decay=weight_decay))


class GroupedOptimizer(Optimizer):
    """Optimizers of disjoint pieces, each with its own learning rate and weight decay."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._of = {piece.name: part.optimizer for part in parts for piece in part.pieces}
        used = [part.optimizer for part in parts if part.pieces] or [part.optimizer for part in parts]
        self.one_pass = all(one.one_pass for one in used)
        self.low_precision_gradients = all(one.low_precision_gradients for one in used)
        self.averages = any(part.optimizer.averages for part in parts)

    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once."""
        for part in self._parts:
            part.step(scalars)

    def state(self, piece: Piece) -> Mapping[str, Tensor | ShapedState]:
        """The live state of a piece."""
        return self._of[piece.name].state(piece)
