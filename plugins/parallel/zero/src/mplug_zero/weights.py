"""Gathers updated weights from their owners on all ranks, overlapped with the next forward pass."""

from collections.abc import Mapping
from typing import Any

from mplug import Model, WeightExchange
from mplug_ops.transfers import joining_parts
from mplug_sharding import Shard
from mplug_zero.groups import Axes, Pair, exchange_of, group_of


class Weights:
    """Gathers buckets in the order in which forward needs them; each unit waits for the buckets of its parameters."""

    def __init__(self, model: Model, groups: Mapping[tuple[Axes, Axes], Pair], overlap: bool) -> None:
        assert model.shards is not None
        self.shards, self.groups, self.overlap = model.shards.all, groups, overlap
        self.exchanges = [
            exchange_of("weights from their owners", one, group_of(groups, one.bucket).owners) for one in self.shards
        ]
        self.under_way: dict[int, Any] = {}
        self.at_once: tuple[int, ...] = ()
        model.exchanges.append(WeightExchange(begin=self.gather, wait=self.settle))
        if overlap:
            self._let_units_wait(model)

    def gather(self) -> None:
        """Start gathering the weights that the owners have updated; without overlap, wait for all of them."""
        self.wait(*self.under_way)
        for number in reversed(range(len(self.shards))):
            self.exchanges[number].check()
            self.under_way[number] = self._begin(self.shards[number])
        self.wait(*(self.at_once if self.overlap else tuple(self.under_way)))

    def _begin(self, shard: Shard) -> Any:
        group = group_of(self.groups, shard.bucket).owners
        assert group is not None
        return joining_parts(shard.weights, group)

    def settle(self) -> None:
        """Wait for all buckets."""
        self.wait(*tuple(self.under_way))

    def wait(self, *numbers: int) -> None:
        """Wait (on a GPU, let the stream wait) for the buckets with these numbers."""
        for number in numbers:
            work = self.under_way.pop(number, None)
            if work is not None:
                work.wait()

    def _let_units_wait(self, model: Model) -> None:
        """Register hooks that run before each unit's call, outside of the compiled code.

        Calls of another method than `forward` run no hook. If such a method uses a unit's parameters, the preceding
        unit waits for their buckets too, or `gather` does if there is none.
        """
        numbers = {name: number for number, shard in enumerate(self.shards) for name in shard.bucket.names}
        names = {id(parameter): name for name, parameter in model.parameters().items()}
        not_called = {unit.name for unit in (*model.plan.units, *model.plan.inference) if unit.method != "forward"}
        following: tuple[int, ...] = ()
        for unit in reversed(model.own_units):
            module = model.module.get_submodule(unit.name)
            own = [names[id(parameter)] for parameter in module.parameters()]
            wanted = (*dict.fromkeys(numbers[name] for name in own if name in numbers), *following)
            module.register_forward_pre_hook(lambda *_, wanted=wanted: self.wait(*wanted))
            following = wanted if unit.name in not_called else ()
        self.at_once = following
