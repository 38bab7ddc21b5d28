"""Balanced streams (`parallel.balance`): what the model must be for it, and how the rows of a stream return.

`mplug_streams.balance` divides the segments of micro batches among ranks that read different samples. A rank then
computes rows for other ranks. They return where a block joins them with tokens, in the slot `Slot.returns_rows`.
"""

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

import mplug_ops as ops
from mplug.config.sources import source_of
from mplug.contracts.micro_batch import DOCUMENTS
from mplug.contracts.streams import RETURNS
from mplug.errors import UsageError, listed
from mplug.layout.plan import TOKENS_AXIS, Plan, Unit
from mplug.model.model import Model
from mplug.model.placed import Placed
from mplug.model.slots.declaration import slots_of
from mplug.model.slots.offers import Offer, Site
from mplug.run.run import Run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

USE = "streams"
"""The use of the process groups in which rows of streams travel."""
KEYS = "keys"
"""The entry with the random keys of samples."""
STRENGTHS = ("probability", "epsilon", "dropout")
"""Attributes of blocks that draw random numbers by the keys of samples; 0: the block draws none."""


def data_axes(run: Run) -> tuple[str, ...]:
    """The mesh axes along which ranks read different samples and balance streams; empty if they do not."""
    if not run.config.parallel.balance:
        return ()
    return tuple(axis.name for axis in run.mesh.views["dense"] if "batch" in axis.entries and axis.size > 1)


def row_returns(run: Run, model: Model) -> list[Offer]:
    """The suppliers that bring rows back, one for each stream.

    Collective: all ranks make the process groups here, including ranks whose stage joins nothing.
    """
    axes = data_axes(run)
    if not axes or not model.plan.streams:
        return []
    group, joined = run.group(*axes, use=USE), _streams_joined(model.plan)

    def brought_back(stream: str, rows: Tensor, returns: "Mapping[str, ops.RowReturn]") -> Tensor:
        return ops.bring_back(rows, returns[stream], group)

    def joins(stream: str, site: Site, _: Run) -> bool:
        return any(f"{site.name}.".startswith(f"{unit}.") and found == {stream} for unit, found in joined.items())

    slots = [slot.name for slot in model.declared.values() if slot.returns_rows]
    return [
        Offer({slot: partial(brought_back, stream)}, partial(joins, stream), plugin="host")
        for slot in slots
        for stream in model.plan.streams
    ]


def refuse_unbalanced(run: Run, model: Placed) -> None:
    """Raise UsageError if the streams of a whole model cannot be balanced, and the config asks for it."""
    if not run.config.parallel.balance:
        return
    (owner,) = run.hooks.implementers("build_model")
    source = source_of(run.config.settings, ("parallel", "balance"))
    packed = DOCUMENTS in run.entries  # the loader may divide the samples by their documents
    reasons = [*_obstacles(model)] if model.plan.streams or not packed else []
    if reasons:
        raise UsageError(
            f"parallel.balance ({source}): the ranks of a layout cannot balance the model of {owner}: "
            f"{listed(dict.fromkeys(reasons))}; set parallel.balance=false"
        )


def _obstacles(model: Placed) -> "Iterator[str]":
    plan = model.plan
    if not plan.streams:
        yield "it has no stream beside the tokens, and samples are not packed"
    for unit in (unit for unit in plan.units if unit.sequence != TOKENS_AXIS):
        written = {name for one in plan.units if one.sequence == unit.sequence for name in one.outputs}
        foreign = {*unit.inputs, *unit.optional} - written - plan.entries_of(unit.sequence) - {KEYS}
        if foreign:
            yield (
                f"'{unit.name}' computes {unit.sequence} with {listed(map(repr, sorted(foreign)))}, which stays on "
                f"the rank of its samples"
            )
        parts = model.module.get_submodule(unit.name).modules()
        if any(getattr(part, name, 0) for part in parts for name in STRENGTHS):
            yield f"'{unit.name}' draws random numbers by the samples of its own rank (dropout, for example)"
    for name, streams in _streams_joined(plan).items():
        if len(streams) > 1:
            yield f"'{name}' takes rows of several streams ({listed(sorted(streams))})"
    for unit in (unit for unit in plan.units if unit.name in _streams_joined(plan)):
        if not _brings_back(unit, model):
            yield (
                f"'{unit.name}' takes rows of a stream without the entry '{RETURNS}', by which they return to the rank "
                f"of their tokens"
            )


def _brings_back(unit: Unit, model: Placed) -> bool:
    slots = [slot for part in model.module.get_submodule(unit.name).modules() for slot in slots_of(part)]
    return RETURNS in unit.optional and any(slot.returns_rows for slot in slots)


def _streams_joined(plan: Plan) -> dict[str, set[str]]:
    """The units of tokens that take rows of streams, by name, and the axes of these streams."""
    writers = {name: one.sequence for one in plan.units if one.sequence != TOKENS_AXIS for name in one.outputs}
    of_rows = {name: axis for name, axis in writers.items() if axis in plan.streams}
    found = {
        unit.name: {of_rows[name] for name in (*unit.inputs, *unit.optional) if name in of_rows}
        for unit in plan.units
        if unit.sequence == TOKENS_AXIS
    }
    return {name: streams for name, streams in found.items() if streams}
