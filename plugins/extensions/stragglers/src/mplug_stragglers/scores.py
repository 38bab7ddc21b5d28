"""Scores of ranks relative to each other: pure functions of the times that ranks have measured.

The score of a rank in a kind of work is the median time of all ranks divided by its own time: 1 is usual, 0.5 is half
as fast. The same measure is used by NVIDIA's resiliency extension ("relative performance score").
"""

from collections.abc import Mapping, Sequence
from statistics import median

PHRASES = {
    "compute": "computes",
    "data": "waits for data",
    "host": "runs Python",
}
"""The kinds of work in which a rank can be slow, and what it does then. A rank that waits for others is not slow."""
LEAST = 0.05
"""Fraction of the step below which a difference between ranks in a kind of work does not matter.

A few milliseconds of Python on a busy core are a large multiple of the other ranks' time, and 4% of a short step.
"""


def scores(times: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """For each rank, its score by kind of work.

    `times` are seconds by kind, for each rank, with `step`, the duration of the step. A time that exceeds the median by
    less than `LEAST` of the step has the score 1.
    """
    usual = {kind: median(one[kind] for one in times) for kind in PHRASES}
    slack = LEAST * median(one["step"] for one in times)
    return [
        {kind: 1.0 if one[kind] <= usual[kind] + slack else max(usual[kind], 1e-9) / one[kind] for kind in PHRASES}
        for one in times
    ]


def lowest(by_rank: Sequence[Mapping[str, float]]) -> tuple[int, float]:
    """(rank, score) of the rank with the lowest score of all kinds of work."""
    least = [min(one.values()) for one in by_rank]
    rank = min(range(len(least)), key=least.__getitem__)
    return rank, least[rank]


def sentences(
    by_rank: Sequence[Mapping[str, float]], times: Sequence[Mapping[str, float]], hosts: Sequence[str], below: float
) -> list[str]:
    """A sentence for each rank with a score below `below`, the slowest first.

    If a rank is slow in several kinds of work, the one that takes the most time beyond the median is named.
    """
    found = []
    for rank, own in enumerate(by_rank):
        slow = [kind for kind, score in own.items() if score < below]
        if not slow:
            continue
        usual = {kind: median(one[kind] for one in times) for kind in slow}
        kind = max(slow, key=lambda kind: times[rank][kind] - usual[kind])
        waiting = median(one["communication"] for number, one in enumerate(times) if number != rank)
        matters = waiting >= LEAST * times[rank]["step"]  # under data parallelism, ranks wait in the backward passes
        found.append(
            (
                own[kind],
                f"rank {rank} on {hosts[rank]} is a straggler: it {PHRASES[kind]} for {times[rank][kind]:.3g} s of a "
                f"step of {times[rank]['step']:.3g} s, and the median of all ranks is {usual[kind]:.3g} s (score "
                f"{own[kind]:.2f})"
                f"{f'; the other ranks wait {waiting:.3g} s in collectives of forward passes' if matters else ''}",
            )
        )
    return [sentence for _, sentence in sorted(found)]
