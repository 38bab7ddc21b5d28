"""Splits the units of a model into contiguous chunks, one for each part of the pipeline."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mplug import Flops, UsageError

if TYPE_CHECKING:
    from mplug import Model

Split = str | Sequence[int]
"""How to split: 'weights', 'layers', 'time', or the number of units of each chunk."""

FLOPS_PER_BYTE = 200
"""Matrix FLOPs that a GPU computes in the time in which it moves one byte: an H100 reaches 600 TFLOP/s and 3 TB/s."""
LOSS_BYTES = 16
"""Bytes that a loss moves per logit, in forward and backward: it reads and writes 16-bit logits and fp32 values."""


def divide(
    model: "Model", num_ranks: int, split: Split, chunks: int = 1, seq_length: int = 1
) -> tuple[tuple[str, ...], ...]:
    """The unit names of each chunk, so that the heaviest chunk is as light as possible, or as the user sets.

    Each of `num_ranks` ranks has `chunks` chunks.

    - 'weights': a unit weighs its number of weight elements that multiply a token (`Model.unit_weight`). A unit that
      only looks up has weight 0.
    - 'layers': every unit that occurs in a row (a block) weighs 1, and all others weigh 0.
    - 'time': the predicted time: products with weights, attention, and the memory traffic of look-up and loss.

    Raises UsageError if the user's numbers do not add up to the number of units, or if there are more chunks than units
    with a positive weight.
    """
    names = [unit.name for unit in model.plan.units]
    if not isinstance(split, str):
        return _cut(names, _by_hand(names, num_ranks * chunks, split))
    weights = {"weights": _weights, "layers": _layers, "time": _times}[split](model, seq_length)
    working = sum(weight > 0 for weight in weights)
    if num_ranks * chunks > working:
        what = f"pp={num_ranks}{f' with {chunks} chunks per rank' if chunks > 1 else ''}"
        reason = "have weights that compute" if split != "layers" else "are layers"
        raise UsageError(
            f"{what} is too large: only {working} units of the model {reason}, and each "
            f"{'chunk' if chunks > 1 else 'stage'} needs one; use pp={max(1, working // chunks)} or less"
        )
    return _cut(names, lightest(weights, num_ranks * chunks))


def _by_hand(names: list[str], num_chunks: int, counts: Sequence[int]) -> tuple[int, ...]:
    if len(counts) != num_chunks:
        raise UsageError(
            f"parallel.pp.split has {len(counts)} numbers, and the pipeline has {num_chunks} chunks; set one number "
            f"per chunk, in the order of the model"
        )
    if sum(counts) != len(names):
        raise UsageError(
            f"parallel.pp.split sums to {sum(counts)}, and the model has {len(names)} units; set numbers that sum to "
            f"{len(names)}"
        )
    return tuple(counts)


def _weights(model: "Model", seq_length: int) -> list[int]:
    """The weight of each unit per token; a unit of a stream has the rows of a sample that its plan states."""
    return [
        -(-model.unit_weight(unit.name) * _rows(model, unit.sequence, seq_length) // seq_length)
        for unit in model.plan.units
    ]


def _rows(model: "Model", sequence: str, seq_length: int) -> int:
    """The rows of a sample along a unit's sequence."""
    return model.plan.streams[sequence].rows if sequence in model.plan.streams else seq_length


def _layers(model: "Model", seq_length: int) -> list[int]:
    return [int(_is_layer(unit.name)) for unit in model.plan.units]


def _is_layer(name: str) -> bool:
    """Whether a unit is one of a row: its name ends in an index."""
    return name.rpartition(".")[2].isdigit()


def _times(model: "Model", seq_length: int) -> list[int]:
    """Predicted times of the units in FLOPs per token, over forward and backward.

    The plan states the FLOPs of attention for the whole model; they are divided equally among the layers.
    """
    layers = sum(_is_layer(unit.name) for unit in model.plan.units if unit.sequence not in model.plan.streams) or 1
    attention = model.plan.flops.of_pairs.of(seq_length, seq_length**2) // seq_length // layers
    times = []
    for unit, weight in zip(model.plan.units, _weights(model, seq_length), strict=True):
        if unit.sequence in model.plan.streams:
            stream = model.plan.streams[unit.sequence]
            of_pairs = Flops.sum(one.flops.of_pairs for one in model.work if one.unit == unit.name)
            times.append(6 * weight + of_pairs.of(stream.rows, stream.squares) // seq_length)
            continue
        width = model.module.get_submodule(unit.name)
        rows = max((parameter.shape[0] for parameter in width.parameters() if parameter.dim() == 2), default=0)
        moved = LOSS_BYTES * rows if "loss" in unit.outputs else 0
        times.append(6 * weight + attention * _is_layer(unit.name) + FLOPS_PER_BYTE * moved)
    return times


def _cut(names: list[str], counts: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    ends = [sum(counts[: chunk + 1]) for chunk in range(len(counts))]
    return tuple(tuple(names[end - count : end]) for end, count in zip(ends, counts, strict=True))


def lightest(weights: list[int], parts: int) -> tuple[int, ...]:
    """Lengths of contiguous parts, each with a positive weight, that minimise the weight of the heaviest part.

    Ties are broken by the smallest sum of squared weights. Dynamic programming over (parts, units): `best[end]` splits
    the first `end` units.
    """
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for _ in range(parts):
        longer: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for start, (heaviest, squares, lengths) in best.items():
            for end in range(start + 1, len(weights) + 1):
                own = sum(weights[start:end])
                choice = (max(heaviest, own), squares + own * own, (*lengths, end - start))
                if own > 0 and (end not in longer or choice < longer[end]):
                    longer[end] = choice
        best = longer
    return best[len(weights)][2]
