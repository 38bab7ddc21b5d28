"""A loader of random tokens, of which sample n is a function of n, and its resume on other ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mplug import MapLoader


def loader_of(
    low: int, high: int, length: int, shard: tuple[int, int] = (0, 1), micro_batch_size: int = 8
) -> MapLoader:
    """Samples of tokens from `low` to below `high`, which is the size of the vocabulary."""

    def read(sample_ids: range) -> dict[str, Any]:
        rows = [torch.randint(low, high, (length,), generator=torch.Generator().manual_seed(n)) for n in sample_ids]
        tokens, ids = torch.stack(rows), torch.tensor(list(sample_ids))
        return {"tokens": tokens, "labels": tokens, "positions": torch.arange(length)[None], "sample_ids": ids}

    return MapLoader(read, vocab_size=high, shard=shard, micro_batch_size=micro_batch_size, fingerprint="f")


def assert_resumes_on_other_ranks(
    made: Callable[..., Any], joined: Callable[[Any], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """After 8 samples, three ranks with micro batches of 3 read on as one loader does. Returns the samples."""
    whole = made()
    list(whole.take(8))
    saved, expected = whole.state_dict(), joined(whole.take(24))
    ranks = [made((rank, 3), 3) for rank in range(3)]
    for loader in ranks:
        loader.load_state_dict(saved)
    found = joined(batch for loader in ranks for batch in loader.take(24))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    return expected
