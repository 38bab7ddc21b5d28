"""The optimizer of a run, which one plugin builds of all pieces, or `mplug.model.updates` of several parts."""

from typing import TYPE_CHECKING

from mplug.contracts.optimizer import Optimizer, Piece
from mplug.errors import PluginError
from mplug.layout.placement import Placement
from mplug.model.assembler import Assembler
from mplug.model.updates import updates_of

if TYPE_CHECKING:
    from mplug.distributed.groups import Groups
    from mplug.model.model import Model
    from mplug.run.run import Run


def build_optimizer(run: "Run", model: "Model", pieces: list[Piece], groups: "Groups | None" = None) -> Optimizer:
    """The optimizer of these pieces; PluginError if the plugin returns another object.

    With `groups`, its collectives can run; a build without memory has none. Collective with groups.
    """
    if (updates := updates_of(run, model)) is not None:
        return updates.optimizer(run, model, pieces, groups)
    everywhere = tuple(one for one in model.placements.values() if one.parameter.trainable)
    optimizer = single_optimizer(run, pieces, Assembler(run, placements_of(model, pieces), everywhere, groups))
    return wrapped(run, model, optimizer, pieces)


def wrapped(run: "Run", model: "Model", optimizer: Optimizer, pieces: list[Piece]) -> Optimizer:
    """The optimizer that plugins make of one (the hook `wrap_optimizer`)."""
    for _, wrap in run.hooks.layered("wrap_optimizer"):
        optimizer = wrap(run=run, model=model, optimizer=optimizer, pieces=pieces) or optimizer
    return optimizer


def placements_of(model: "Model", pieces: list[Piece]) -> dict[str, Placement]:
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
    """What the plugin builds of the pieces alone; PluginError if it is no optimizer."""
    optimizer = run.hooks.call.build_optimizer(run=run, pieces=pieces, assembler=assembler)
    (label,) = run.hooks.implementers("build_optimizer")
    return checked(optimizer, label)


def checked(optimizer: object, label: str) -> Optimizer:
    """The answer of the plugin `label`; PluginError if it is no optimizer."""
    if not isinstance(optimizer, Optimizer):
        returned = type(optimizer).__name__
        raise PluginError(f"build_optimizer of {label} returns '{returned}', which is not derived from mplug.Optimizer")
    return optimizer


def builder_of(run: "Run", model: "Model", name: str) -> str:
    """The label of the plugin that builds the optimizer of a parameter."""
    own = run.config.groups[model.groups[name]].optimizer if name in model.groups else None
    return own.label if own is not None else run.hooks.implementers("build_optimizer")[0]
