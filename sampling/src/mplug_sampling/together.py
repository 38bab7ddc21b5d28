"""The ranks of a run that trains, when they sample between two steps: what their layout makes them do together.

- Each group of ranks that has a model samples prompts of its own. If these groups exchange something inside a call of
  the model (the tokens of experts, parts of weights), all make the same number of calls: a group whose texts have ended
  computes a token that nobody reads, until all have ended. The calls of two groups at the same time may differ in
  shape, so an exchange that needs equal ones is refused (`refuse_even`).
- The stages of a pipeline run one after another in each call, and the last one shares the logits.
- Weights that ranks store in parts are gathered for the whole rollout, or in each call (`gathers`).

b texts of a call, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mplug import Mesh, Model, Run, UsageError
from mplug.commands import Instead, Selection
from mplug_sampling.decoding import Ranks
from mplug_sampling.sampler import Sampler, owners_of_axes
from mplug_sampling.stages import run_last
from mplug_sampling.token_steps import last_logits

Gathers = Literal["rollout", "units"]
"""When stored parts of weights are gathered: once for each rollout, or those of each unit in each call."""


class Together(Ranks):
    """The ranks that sample with the model of `sampler`, between the steps of a run. Collective."""

    def __init__(self, run: Run, sampler: Sampler, gathers: Gathers = "rollout") -> None:
        super().__init__(run, sampler)
        self.shard, self.shards = 0, 1
        self.model, self.gathers = sampler.model, gathers
        self.device = torch.device(run.device)
        self._wide = torch.promote_types(run.precision.weight_dtype, torch.float32)
        self._num_logits = max(run.gathered(_num_rows_of_vocabulary(self.model))) if self.divided else 0
        axes = [axis.name for axis in run.mesh.views["dense"] if axis.entries]
        group = run.group(*axes, use="sampling")
        in_step = bool(exchanging_axes(run.mesh)) or (gathers == "units" and stores_parts(self.model))
        self._in_step = group if in_step else None
        self._parts = [one for one in self.model.exchanges if one.held is not None]
        if stores_parts(self.model) and run.group(*axes) is not None and not self._parts:
            raise UsageError(
                f"the layout '{run.config.parallel.layout}' stores parts of weights, and its strategy does not gather "
                f"them to sample (WeightExchange.held); use a layout without it"
            )

    def last_logits(
        self, model: Model, entries: Mapping[str, Tensor], instead: Instead, last: Tensor | None = None
    ) -> Tensor:
        """The logits [b, V / R] behind texts; [b, V] if the model is divided into stages. Collective."""
        if self._in_step is not None:
            dist.all_reduce(torch.ones((), device=self.device), dist.ReduceOp.MAX, self._in_step)
        if self.divided is None:
            return last_logits(model, entries, instead, last)
        result = torch.empty(len(entries["tokens"]), self._num_logits, dtype=self._wide, device=self.device)
        return self.run_units(model, entries, partial(run_last, model, instead=instead, last=last), self._whole, result)

    def finish(self, compute: Callable[[], object]) -> None:
        """Call `compute`, which makes one call of the model, until the texts of all groups have ended. Collective."""
        while self._in_step is not None:
            others = torch.zeros((), device=self.device)
            dist.all_reduce(others, dist.ReduceOp.MAX, self._in_step)
            if not others.item():
                return
            group, self._in_step = self._in_step, None  # this rank has announced the call
            try:
                compute()
            finally:
                self._in_step = group

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """In the block, the model can sample: whole weights are here, unless each call gathers them. Collective."""
        with ExitStack() as stack:
            for exchange in self._parts if self.gathers == "rollout" else ():
                assert exchange.held is not None
                stack.enter_context(exchange.held())
            yield

    def _whole(self, logits: Tensor) -> Tensor:
        return self.whole_vocabulary(logits[:, -1])[:, : self._num_logits].to(self._wide)


def prompt_shard(mesh: Mesh, rank: int) -> tuple[int, int]:
    """(index, count): this rank completes part `index` of `count` equal parts of the prompts of a rollout.

    Ranks that divide the positions of the same samples in training complete consecutive parts.
    """
    shard, shards = mesh.batch_shard(rank)
    index, count = part_of_samples(mesh, rank)
    return shard * count + index, shards * count


def part_of_samples(mesh: Mesh, rank: int) -> tuple[int, int]:
    """(index, count): the number of a rank among those that divide the positions of the same samples in training."""
    axes = [axis for axis in mesh.views["dense"] if axis.entries and "batch" not in axis.entries]
    return mesh.number(rank, [axis.name for axis in axes]), math.prod(axis.size for axis in axes)


def exchanging_axes(mesh: Mesh) -> list[str]:
    """The mesh axes whose ranks have different prompts and exchange tokens inside the model."""
    found = []
    for axis in mesh.axes.values():
        shards = {prompt_shard(mesh, rank) for rank in mesh.group(0, axis.name)}
        if not axis.entries and len(shards) > 1:
            found.append(axis.name)
    return found


def refuse_even(run: Run, selection: Selection) -> None:
    """Raise UsageError if an exchange of tokens needs calls of equal sizes: texts of two ranks differ in length."""
    owners = owners_of_axes(run)
    exchanging = {owners[name] for name in exchanging_axes(run.mesh) if name in owners}
    for filled in selection.filled:
        for wrap in filled.wraps:
            if wrap.plugin in exchanging and not wrap.uneven:
                raise UsageError(
                    f"{wrap.label} does not declare that ranks may exchange tensors of different sizes in "
                    f"'{filled.site.name}' (Wrap.uneven), and ranks that sample have texts of different lengths; use "
                    f"a method of {wrap.plugin} that sends as many tokens as there are, or a layout without it"
                )


def stores_parts(model: Model) -> bool:
    """Whether ranks store parts of weights, which they gather to compute."""
    return any(placement.gathered_along for placement in model.placements.values())


def _num_rows_of_vocabulary(model: Model) -> int:
    """V, or 0 on a stage without a parameter of the vocabulary."""
    segments = [one for placement in model.placements.values() for dim in placement.dims for one in dim]
    return max((one.count for one in segments if one.axis == "vocab"), default=0)
