"""The optimizer of a run, which one plugin builds of all pieces, or `mplug.model.updates` of several parts."""

from typing import TYPE_CHECKING

from mplug.config.host_sections import ParameterGroup
from mplug.contracts.optimizer import Optimizer, Piece
from mplug.errors import PluginError
from mplug.layout.placement import Placement
from mplug.model.assembler import Assembler
from mplug.model.builders import HOOK, builder, hook_of
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


def single_optimizer(
    run: "Run", pieces: list[Piece], assembler: Assembler, group: ParameterGroup | None = None
) -> Optimizer:
    """What the plugin builds of the pieces of a group alone; PluginError if it is no optimizer."""
    optimizer = hook_of(run, group, HOOK)(run=run, pieces=pieces, assembler=assembler)
    if not isinstance(optimizer, Optimizer):
        label, returned = builder(run, group), type(optimizer).__name__
        raise PluginError(f"build_optimizer of {label} returns '{returned}', which is not derived from mplug.Optimizer")
    return optimizer
