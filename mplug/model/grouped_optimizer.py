"""The optimizer of a run: one, or one for each group of parameters with rates of its own (`optimizer.groups`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from mplug.contracts.optimizer import Optimizer, Piece, ShapedState, StepScalars
from mplug.errors import PluginError, UsageError, listed
from mplug.layout.placement import Placement
from mplug.model.assembler import Assembler
from mplug.model.plans.grouping import FIELD

if TYPE_CHECKING:
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
    placements = _placements(model, pieces)
    everywhere = {name: one for name, one in model.placements.items() if one.parameter.trainable}
    if not run.config.groups:
        return single_optimizer(run, pieces, Assembler(run, placements, tuple(everywhere.values()), groups))
    rates = [(1.0, 1.0), *((one.lr_scale, one.weight_decay_scale) for one in run.config.groups)]
    parts = []
    for number, (lr, weight_decay) in enumerate(rates, start=-1):

        def is_own(name: str, number: int = number) -> bool:
            return model.groups.get(name, -1) == number

        own = [piece for piece in pieces if is_own(piece.name)]
        held = {name: one for name, one in placements.items() if is_own(name)}
        assembler = Assembler(run, held, tuple(one for name, one in everywhere.items() if is_own(name)), groups)
        # An optimizer may have collectives, so every rank builds and runs all of them, also those without pieces.
        parts.append(Part(single_optimizer(run, own, assembler), own, lr, weight_decay))
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


def single_optimizer(run: "Run", pieces: list[Piece], assembler: Assembler) -> Optimizer:
    """What the plugin builds of these pieces alone; PluginError if it is no optimizer."""
    optimizer: object = run.hooks.call.build_optimizer(run=run, pieces=pieces, assembler=assembler)
    if not isinstance(optimizer, Optimizer):
        (label,) = run.hooks.implementers(HOOK)
        returned = type(optimizer).__name__
        raise PluginError(f"build_optimizer of {label} returns '{returned}', which is not derived from mplug.Optimizer")
    return optimizer


def refuse_single(run: "Run") -> None:
    """Raise UsageError if the config has groups, and the plugin may not be able to build several optimizers."""
    if not run.config.groups:
        return
    (label,) = run.hooks.implementers(HOOK)
    hooks = [hook for hook in FOR_WHOLE_RUNS if label in run.hooks.implementers(hook)]
    if hooks:
        raise UsageError(
            f"{FIELD} needs an optimizer for each group, and {label} keeps something for the whole run (the hook "
            f"{listed(map(repr, hooks))}); remove the groups, or use another optimizer"
        )


class Part(NamedTuple):
    """The optimizer of a group, its pieces on this rank, and the factors on the rates of the run."""

    optimizer: Optimizer
    pieces: Sequence[Piece]
    lr: float
    weight_decay: float

    def step(self, scalars: StepScalars) -> None:
        """Update the pieces of the group once."""
        lr, weight_decay = _scaled(scalars.lr, self.lr), _scaled(scalars.weight_decay, self.weight_decay)
        self.optimizer.step(replace(scalars, lr=lr, weight_decay=weight_decay))


def _scaled(rate: Tensor, factor: float) -> Tensor:
    """The product, rounded once."""
    return rate if factor == 1.0 else (rate.double() * factor).to(rate.dtype)


class GroupedOptimizer(Optimizer):
    """Optimizers of disjoint pieces, each with its own learning rate and weight decay."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._of = {piece.name: part.optimizer for part in parts for piece in part.pieces}
        used = [part.optimizer for part in parts if part.pieces] or [part.optimizer for part in parts]
        self.one_pass = all(one.one_pass for one in used)
        self.low_precision_gradients = all(one.low_precision_gradients for one in used)

    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once."""
        for part in self._parts:
            part.step(scalars)

    def state(self, piece: Piece) -> Mapping[str, Tensor | ShapedState]:
        """The live state of a piece."""
        return self._of[piece.name].state(piece)
