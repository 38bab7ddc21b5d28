"""Splits an ordered list of units into contiguous stages."""

from typing import TYPE_CHECKING

from mplug import UsageError

if TYPE_CHECKING:
    from mplug import Model


def divide(model: "Model", num_stages: int, units_per_stage: tuple[int, ...] | None) -> tuple[tuple[str, ...], ...]:
    """The unit names of each stage: as many as the user sets, or split so that the heaviest stage is minimal.

    The weight of a unit is the number of weight elements that multiply a token (`Model.unit_weight`). A unit that only
    looks up has weight 0. Raises UsageError if the user's numbers do not add up to the number of units, or if there
    are more stages than units with a positive weight.
    """
    names = [unit.name for unit in model.plan.units]
    if units_per_stage is not None:
        if sum(units_per_stage) != len(names):
            raise UsageError(
                f"parallel.pp.units_per_stage sums to {sum(units_per_stage)}, and the model has {len(names)} units; "
                f"set numbers that sum to {len(names)}"
            )
        return _cut(names, units_per_stage)
    weights = [model.unit_weight(name) for name in names]
    working = sum(weight > 0 for weight in weights)
    if num_stages > working:
        raise UsageError(
            f"pp={num_stages} is too large: only {working} units of the model have weights that compute, and each "
            f"stage needs one; use pp={working} or less"
        )
    return _cut(names, lightest(weights, num_stages))


def _cut(names: list[str], counts: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
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
