"""Sampling with a pipeline: all chunks run forward for a token of every sample; the last stage shares the tokens."""

from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from mplug import MicroBatch, Model, Run
from mplug_pp.wire import Crossing, key_of, wires_of
from mplug_schedules import Kind, forward_half

Compute = Callable[[int, Mapping[str, Tensor]], Mapping[str, Tensor]]


class ForwardRelay:
    """Follows the forward half of the schedule's table for one micro batch.

    All samples are one micro batch: each token needs the one before it, so a stage would read its weights again for
    every further micro batch of a token.
    """

    def __init__(self, run: Run, model: Model, crossing: Sequence[tuple[str, ...]]) -> None:
        assert model.stages.table is not None
        table = forward_half(model.stages.table(1))
        members = [*run.mesh.group(run.rank, "pp")]
        self.row, self.last = table.rows[members.index(run.rank)], len(table.ranks) - 1
        self.source, self.group = members[table.ranks[-1]], run.group("pp")
        self.crossings = [Crossing(names) for names in crossing]
        self.wires = wires_of(run, model)

    def __call__(self, entries: MicroBatch, compute: Compute, result: Tensor) -> Tensor:
        """Run this rank's chunks; every rank of the pipeline gets the result of the last chunk."""
        key, arriving = key_of(entries), dict[int, Callable[[], list[Tensor]]]()
        leaving = dict[int, list[Tensor]]()
        for kind, _, chunk, peer in self.row:
            if kind is Kind.RECEIVE_FORWARD:
                assert peer is not None
                arriving[chunk] = self.crossings[chunk].receive(self.wires[peer], key)
            elif kind is Kind.SEND_FORWARD:
                assert peer is not None
                self.crossings[chunk + 1].send(self.wires[peer], leaving.pop(chunk + 1), key)
            else:
                tensors = leaving.pop(chunk, None)
                if chunk and tensors is None:
                    tensors = arriving.pop(chunk)()
                taken = zip(self.crossings[chunk].names, tensors or [], strict=True)
                values = compute(chunk, {**entries, **dict(taken)})
                if chunk == self.last:
                    (result,) = values.values()
                else:
                    leaving[chunk + 1] = [values[name] for name in self.crossings[chunk + 1].names]
        for wire in self.wires.values():
            wire.finish()
        return self._shared(result)

    def _shared(self, result: Tensor) -> Tensor:
        if self.group is not None:
            result = result.contiguous()
            dist.broadcast(result, self.source, self.group)
        return result
