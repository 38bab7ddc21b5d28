"""Which samples of a step a rank reads, and in which micro batches, so that all have equal work (`parallel.balance`).

Pure. The samples of a step are those of the global order, as without balance. Only their ranks and micro batches are
others, so the sum of the losses is the same. All ranks compute the same division from the lengths of documents.
"""

import heapq
from collections.abc import Sequence


def dealt(work: Sequence[int], shards: int, micro_batch_size: int) -> list[list[int]]:
    """The numbers of the samples of each shard, in the order of its micro batches; `work` is that of each sample.

    Every shard has equally many samples: `shards` must divide their number. First, samples form micro batches: the
    sample with the most work comes first, and each goes to the micro batch with the least work that has room. Then
    micro batches are dealt: the `shards` ones with the most work are the first of all shards, and so on, so that ranks
    which wait for each other in every micro batch wait little. In each round, the shard with the least work so far
    gets the micro batch with the most.
    """
    each = len(work) // shards
    if each * shards != len(work):
        raise ValueError(f"{shards} shards do not divide {len(work)} samples")
    full, rest = divmod(each, micro_batch_size)
    rooms = [micro_batch_size] * (full * shards) + ([rest] * shards if rest else [])
    batches = _filled(work, rooms)
    found, sums = [list[int]() for _ in range(shards)], [0] * shards
    for group in (batches[: full * shards], batches[full * shards :]):  # smaller micro batches are the last ones
        by_work = sorted(group, key=lambda batch: (-sum(work[one] for one in batch), batch))
        for start in range(0, len(by_work), shards):
            order = sorted(range(shards), key=lambda shard: (sums[shard], shard))
            for batch, shard in zip(by_work[start : start + shards], order, strict=True):
                found[shard] += batch
                sums[shard] += sum(work[one] for one in batch)
    return found


def _filled(work: Sequence[int], rooms: Sequence[int]) -> list[list[int]]:
    """The samples of each micro batch, with `rooms` for so many, by decreasing work into the least filled one."""
    batches = [list[int]() for _ in rooms]
    least = [(0, number) for number, room in enumerate(rooms) if room]
    for one in sorted(range(len(work)), key=lambda number: (-work[number], number)):
        total, number = heapq.heappop(least)
        batches[number].append(one)
        if len(batches[number]) < rooms[number]:
            heapq.heappush(least, (total + work[one], number))
    return batches


def imbalance(work: Sequence[int], shares: Sequence[Sequence[int]]) -> float:
    """The work of the shard with the most, over the mean of all shards; 1 if there is no work."""
    sums = [sum(work[one] for one in share) for share in shares]
    return max(sums) * len(sums) / sum(sums) if sum(sums) else 1.0
