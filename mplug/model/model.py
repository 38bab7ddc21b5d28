"""A model as the host handles it, in stages: built, placed, cut to this rank's part, allocated.

Each stage is a type that adds its fields to those of the stage before it. A function that works at a stage takes the
type of this stage, and so cannot read what later stages add.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mplug.gradients.sinks import Sinks
from mplug.model.rank_part import RankPart

if TYPE_CHECKING:
    from mplug.contracts.optimizer import Piece, WeightExchange


@dataclass
class Model(RankPart):
    """A module and its plan, which `build_model` returns; the host adds the fields of all later stages.

    The fields of this class are those of the last stage: the memory of this rank's part. `frozen` are its untrained
    parameters, as stored at rest. A plugin that moves the memory of one, or replaces it in the module, must keep its
    `data` pointing to the values. `shards` is the memory of a sharded optimizer state (`Shardings.memory`). A plugin
    that exchanges updated weights between ranks appends a `WeightExchange` to `exchanges`. `master_dtype` is the dtype
    of the masters.
    `weights_version` grows whenever pieces have new weights. `is_repeating`: the passes of a step run again (the hook
    `build_step_check`), so tensors inside units may have other shapes than in the step's first passes.
    """

    shards: Any = None
    frozen: dict[str, nn.Parameter] = field(default_factory=dict)
    master_dtype: torch.dtype = torch.float32
    exchanges: "list[WeightExchange]" = field(default_factory=list)
    weights_version: int = 0
    is_repeating: bool = False
    _sinks: Sinks | None = None
    _supplied: "tuple[Piece, ...] | None" = None

    @property
    def sinks(self) -> Sinks:
        """The gradient sinks of this rank's parameters; they exist after `listen`."""
        assert self._sinks is not None, "the model has no memory yet"
        return self._sinks

    def listen(self, dtype: torch.dtype = torch.float32) -> None:
        """Give every parameter of this rank a gradient sink with a buffer of `dtype`.

        If an engine keeps the gradients, there is no sink, and a parameter has the gradient that autograd accumulates
        (`.grad`).
        """
        if self.engine is not None:
            self._sinks = Sinks({})
            return
        families = {name: placement.data_axes for name, placement in self.placements.items()}
        self._sinks = Sinks(self.parameters(), families, dtype, self.shards.listen(dtype) if self.shards else None)
        self._sinks.chunks = len(self.own_chunks)

    def supply(self, pieces: "Iterable[Piece]") -> None:
        """Hand over this rank's pieces, whose memory an engine keeps; the strategy with the engine calls it once."""
        self._supplied = tuple(pieces)

    @property
    def supplied(self) -> "tuple[Piece, ...]":
        """The pieces that the strategy with the engine has supplied; RuntimeError if it has not."""
        if self._supplied is None:
            raise RuntimeError("the strategy whose sharding has an engine has not called model.supply in wrap_model")
        return self._supplied

    def weights_written(self) -> None:
        """Begin all `exchanges`: this rank's pieces have new weights, and other ranks lack them."""
        self.weights_version += 1
        for exchange in self.exchanges:
            exchange.begin()

    def weights_settled(self) -> None:
        """Wait for the exchanges that `weights_written` has begun."""
        for exchange in self.exchanges:
            if exchange.wait is not None:
                exchange.wait()

    def trained_in(self, chunk: int) -> tuple[str, ...]:
        """The names of the trained parameters in a chunk of this rank."""
        parts = [self.module.get_submodule(unit.name) for unit in self.units_of(chunk)]
        inside = {id(parameter) for part in parts for parameter in part.parameters()}
        return tuple(name for name, one in self.parameters().items() if id(one) in inside and name in self.sinks)
