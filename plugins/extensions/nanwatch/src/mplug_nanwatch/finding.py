"""The origin of values that are not finite, from the reports of all ranks: pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mplug import counted, listed

if TYPE_CHECKING:
    from torch import Tensor

SHOWN = 8
"""Samples and ranks that a sentence lists."""


@dataclass(frozen=True)
class Check:
    """A tensor that was not finite: micro batch, place in the flow of data (forward before backward), unit and name.

    `number` is -1 for the gradient of a weight, which belongs to all micro batches. `rows` are the numbers of the
    samples of the micro batch with a value that is not finite, or empty if the tensor has no such rows.
    """

    number: int
    place: int
    unit: str
    tensor: str
    rows: tuple[int, ...] = ()

    def read(self, flags: "Tensor") -> "Check | None":
        """The check with its rows; None if no flag is set. Waits for the device."""
        rows = flags.nonzero().flatten().tolist()
        return replace(self, rows=tuple(rows) if len(flags) > 1 else ()) if rows else None


@dataclass(frozen=True)
class RankReport:
    """What a rank found.

    `checks` failed in the rerun. `first_sum` is the first place of the step itself whose sum was not finite.

    `samples` are the ids of each micro batch, `entries` and `weights` what is not finite before the passes.
    """

    rank: int
    host: str
    first_sum: int | None
    samples: tuple[tuple[int, ...], ...]
    entries: tuple[str, ...]
    weights: tuple[str, ...]
    checks: tuple[Check, ...]


def sentence(reports: Sequence[RankReport]) -> str:
    """The origin, without a full stop."""
    if bad := [one for one in reports if one.weights]:
        return _of_weights(bad, len(reports))
    if entries := dict.fromkeys(entry for one in reports for entry in one.entries):
        return f"bad data: {listed(entries)} is not finite"
    if not any(one.checks for one in reports):
        return _transient(reports)
    return _reproduced(reports)


def _of_weights(bad: Sequence[RankReport], number: int) -> str:
    first = bad[0].weights[0]
    holding = [one for one in bad if first in one.weights]
    more = f" (and {counted(len(bad[0].weights) - 1, 'other weight')})" if len(bad[0].weights) > 1 else ""
    cause = (
        "other ranks compute with finite weights, so the memory of this rank is the likely cause"
        if len(bad) < number
        else "all ranks hold such weights, so an update or a checkpoint is the likely cause"
    )
    return f"the weight '{first}'{more} of {_ranks(holding)} is not finite: {cause}"


def _transient(reports: Sequence[RankReport]) -> str:
    first = min((one.first_sum for one in reports if one.first_sum is not None), default=None)
    suspects = [one for one in reports if first is not None and one.first_sum == first]
    earliest = _ranks(suspects) if suspects and len(suspects) < len(reports) else ""
    where = f"of {earliest}" if earliest else "of a rank that the sums of the step do not show"
    return (
        f"a transient fault {where}: the same passes of the same micro batches are finite when they run again, so "
        f"neither the program nor the data is the cause; exclude the machine if this happens again"
    )


def _reproduced(reports: Sequence[RankReport]) -> str:
    of_activations = [check for one in reports for check in one.checks if check.number >= 0]
    found = of_activations or [check for one in reports for check in one.checks]
    first = min(found, key=lambda check: check.place)
    here = [one for one in reports if any(_same(check, first) for check in one.checks)]
    bad = sorted({sample for one in here for check in one.checks if _same(check, first) for sample in _ids(one, check)})
    every = {sample for one in reports for batch in one.samples for sample in batch}
    where = (
        f"unit '{first.unit}' is the first one with a value that is not finite, in {first.tensor}, on {_ranks(here)}"
    )
    if not of_activations:
        return f"{where}; the activations and their gradients are finite: a wrong gradient of this weight"
    if len(bad) < len(every):
        return (
            f"{where}, and only for {_samples(bad)} of {len(every)}: look at the data of these samples; a rerun gives "
            f"the same result, so it is no transient fault"
        )
    return (
        f"{where}, for all {counted(len(every), 'sample')} of the step: the program or its weights are the cause, not "
        f"the data; a rerun gives the same result, so it is no transient fault"
    )


def _same(check: Check, first: Check) -> bool:
    return (check.place, check.unit, check.tensor) == (first.place, first.unit, first.tensor)


def _ids(report: RankReport, check: Check) -> tuple[int, ...]:
    """The samples of a failed check."""
    if check.number < 0:
        return tuple(sample for batch in report.samples for sample in batch)
    batch = report.samples[check.number]
    return tuple(batch[row] for row in check.rows) if check.rows else batch


def _ranks(reports: Sequence[RankReport]) -> str:
    names = [f"rank {one.rank} on {one.host}" for one in reports[:SHOWN]]
    return listed([*names, *([f"{len(reports) - SHOWN} more ranks"] if len(reports) > SHOWN else [])])


def _samples(ids: Sequence[int]) -> str:
    if len(ids) == 1:
        return f"sample {ids[0]}"
    more = [f"{len(ids) - SHOWN} more"] if len(ids) > SHOWN else []
    return f"samples {listed([*map(str, ids[:SHOWN]), *more])}"
