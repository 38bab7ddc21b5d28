"""Forward passes of a model that a strategy has divided into stages.

The chunks are those of training (`Stages`). Each runs the inference units of the plan that belong to it; a chunk
without any passes on what it receives.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from mplug import Model, Relay, Unit, UsageError
from mplug.commands import AS_THEY_ARE, Instead, modules_around, run_units

RunUnits = Callable[[Sequence[Unit], Mapping[str, Tensor]], Mapping[str, Tensor]]
"""(inference units, values) -> the values, with the outputs of the units."""
Choose = Callable[[Tensor], Tensor]
"""The logits [b, V / R] of the last position -> tokens [b]."""
Finish = Callable[[Tensor], Tensor]
"""The logits [b, S, V / R] -> what all ranks of a pipeline need."""


def run_last(
    model: Model,
    units: Sequence[Unit],
    entries: Mapping[str, Tensor],
    instead: Instead = AS_THEY_ARE,
    last: Tensor | None = None,
) -> dict[str, Tensor]:
    """Run some inference units of a model whose modules have caches; the last unit computes the last position only.

    `last` [B]: the place of each sample's last position, if padding follows it.
    """
    *_, head = model.plan.inference
    values = run_units(model.module, [unit for unit in units if unit is not head], entries, instead=instead)
    if head not in units:
        return values
    activations = model.plan.activations
    for name in head.inputs:
        if "sequence" in activations.get(name, ()):
            dim = activations[name].index("sequence")
            values[name] = _last_of(values[name], dim, last)
    return run_units(model.module, [head], values, instead=instead)


def _last_of(x: Tensor, dim: int, last: Tensor | None) -> Tensor:
    """The last position along a dimension; with `last` [B], that of each sample along dimension 0."""
    if last is None:
        return x.narrow(dim, x.shape[dim] - 1, 1).contiguous()
    places = last.view(-1, *(1 for _ in x.shape[1:])).expand(*x.shape[:dim], 1, *x.shape[dim + 1 :])
    return x.gather(dim, places)


@dataclass(frozen=True)
class DividedModel:
    """The inference units of each chunk, the activations that enter each, and the strategy's relay, which runs them.

    An activation enters a chunk if it is computed before it and used in it or later. Logits are always used.
    """

    relay: Relay
    units: tuple[tuple[Unit, ...], ...]
    crossing: tuple[tuple[str, ...], ...]

    def run(self, entries: Mapping[str, Tensor], run: RunUnits, finish: Finish, result: Tensor) -> Tensor:
        """What `finish` makes of the logits, on every rank, in a tensor like `result`; `run` runs units on values."""

        def compute(chunk: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            values = run(self.units[chunk], values)
            if chunk + 1 == len(self.units):
                return {"result": finish(values["logits"])}
            return {name: values[name] for name in self.crossing[chunk + 1]}

        return self.relay(entries, compute, result)


def divided(model: Model, inference: Sequence[Unit]) -> DividedModel | None:
    """How ranks run these inference units together, if the model is divided into several chunks. Collective."""
    if len(model.stages.units) == 1:
        return None
    assert model.pipeline is not None
    assert model.pipeline.relay is not None  # else the sampler has refused the run
    units = _divided(model, inference)
    crossing = tuple(_entering(units, chunk) for chunk in range(len(units)))
    return DividedModel(model.pipeline.relay(crossing), units, crossing)


def _divided(model: Model, units: Sequence[Unit]) -> tuple[tuple[Unit, ...], ...]:
    """The inference units of each chunk; UsageError if they do not follow the order of the chunks."""
    chunks = [_chunk_of(model, unit) for unit in units]
    for unit, (before, after) in zip(units[1:], pairwise(chunks), strict=True):
        if after < before:
            raise UsageError(
                f"the inference unit '{unit.name}' is in chunk {after} of the pipeline, and the unit before it in "
                f"chunk {before}; use a layout without pipeline stages"
            )
    numbers = range(len(model.stages.units))
    return tuple(tuple(unit for unit, chunk in zip(units, chunks, strict=True) if chunk == one) for one in numbers)


def _entering(units: tuple[tuple[Unit, ...], ...], chunk: int) -> tuple[str, ...]:
    made = [name for part in units[:chunk] for unit in part for name in unit.outputs]
    used = {name for part in units[chunk:] for unit in part for name in (*unit.inputs, *unit.optional)}
    return tuple(name for name in dict.fromkeys(made) if name in used | {"logits"})


def _chunk_of(model: Model, unit: Unit) -> int:
    around = (unit.name, *modules_around(unit.name))
    found = next((model.stages.of[name] for name in around if name in model.stages.of), None)
    if found is None:
        raise UsageError(
            f"the inference unit '{unit.name}' is in no unit that trains, so it is in no stage of the pipeline; use a "
            f"layout without pipeline stages"
        )
    return found
