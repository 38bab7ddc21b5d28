"""The curves of a run, from its metrics.jsonl. N steps, P points."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

MOST_POINTS = 1200
"""Maximum number of points of a curve: a picture in a browser has fewer pixels."""
AXES = ("step", "tokens", "seconds")
"""The x axes."""
NO_CURVE = {"step", "tokens"}
"""Fields of a record that are axes and no curves."""
LOAD = "load"
"""The statistic of a router that counts how often each expert was chosen."""
Column = list[float | None]


@dataclass(frozen=True)
class Curves:
    """The curves of a run: `axes` by the name of the axis [P], `values` by the name of the figure [P].

    A point is the mean of up to `width` steps, and stands at the last of them. `loads` has the load of experts in the
    last step, by the name of the router.
    """

    axes: dict[str, list[float]]
    values: dict[str, Column]
    width: int
    loads: dict[str, list[float]] = field(default_factory=dict)


def curves_of(records: Sequence[Mapping[str, Any]]) -> Curves:
    """The curves of a run with these records."""
    figures = [dict(_figures(record)) for record in records]
    names = list(dict.fromkeys(name for one in figures for name in one))
    width = max(1, math.ceil(len(records) / MOST_POINTS))
    axes: dict[str, list[float]] = {axis: [] for axis in AXES}
    values: dict[str, Column] = {name: [] for name in names}
    seconds = 0.0
    for start in range(0, len(records), width):
        part = range(start, min(start + width, len(records)))
        seconds += sum(records[number].get("step_s") or 0.0 for number in part)
        last = records[part[-1]]
        for axis, value in zip(AXES, (last["step"], last.get("tokens", 0), seconds), strict=True):
            axes[axis].append(value)
        for name in names:
            found = [value for number in part if (value := figures[number].get(name)) is not None]
            values[name].append(fmean(found) if found else None)
    drawn = {name: column for name, column in values.items() if any(value is not None for value in column)}
    if not any(drawn.get("skipped", ())):
        drawn.pop("skipped", None)
    return Curves(axes, drawn, width, _loads(records[-1]) if records else {})


def _figures(record: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """(name, number) of each figure of a step that has a curve."""
    for name, value in record.items():
        if name == "statistics":
            yield from _statistics(value)
        elif name not in NO_CURVE and (value is None or isinstance(value, int | float)):
            yield name, None if value is None else float(value)


def _statistics(statistics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(role, number) of the statistics of modules; modules that differ in their indices only have one role.

    Of the loads of experts, the largest over the mean, and of it the maximum over modules. Of other numbers, and of the
    elements of short lists, the mean over modules; of long lists, the largest element.
    """
    ratios, numbers = dict[str, list[float]](), dict[str, list[float]]()
    for name, value in statistics.items():
        role = _role(name)
        if isinstance(value, int | float):
            numbers.setdefault(role, []).append(value)
        elif _is_load(name) and (ratio := _largest_over_mean(value)) is not None:
            ratios.setdefault(f"{role}{LARGEST}", []).append(ratio)
        elif _is_list(value) and len(value) <= SHORT:
            for number, one in enumerate(value):
                numbers.setdefault(f"{role}[{number}]", []).append(one)
        elif _is_list(value):
            numbers.setdefault(f"{role}, largest", []).append(max(value))
    yield from ((role, max(values)) for role, values in ratios.items())
    yield from ((role, fmean(values)) for role, values in numbers.items())


LARGEST = ", largest over mean"
"""The end of the name of the figure that stands for the loads of experts."""
SHORT = 4
"""Maximum number of elements of a list that has a curve for each element."""


def _role(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^./])", "*", name)


def _largest_over_mean(value: Any) -> float | None:
    """The largest element of a list of numbers over the mean; None for other values, or a mean that is not positive."""
    if not _is_list(value):
        return None
    mean = fmean(value)
    return max(value) / mean if mean > 0 else None


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, int | float) for one in value)


def _is_load(name: str) -> bool:
    return re.split(r"[./]", name)[-1] == LOAD


def _loads(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """By router, the load of each expert over the mean."""
    found = {}
    for name, value in record.get("statistics", {}).items():
        if _is_load(name) and _largest_over_mean(value) is not None:
            mean = fmean(value)
            found[name] = [one / mean for one in value]
    return found
