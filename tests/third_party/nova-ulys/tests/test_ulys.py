"""Ulysses passes the suite of strategies; which KV heads travel is checked by counting."""

import pytest
from mplug_testing import ParallelSuite
from nova_ulys.exchange import kv_repeats


class TestUlysses(ParallelSuite):
    plugin = "ulys"
    refused = {
        "ulys8": ("ulys=8", "4 query heads"),
        "ulys4tp2": ("ulys=4", "2 query heads", "use ulys=1 or 2"),
        "ulys3": ("ulys=3", "trainer.seq_length", "16"),
    }


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 6, 12])
def test_every_rank_gets_the_kv_heads_of_its_query_heads(size: int, kv_heads: int) -> None:
    heads = 12
    repeats = kv_repeats(heads, kv_heads, size)
    sent = [head for head in range(kv_heads) for _ in range(repeats)]
    assert len(sent) % size == 0
    per_rank, block = len(sent) // size, heads // len(sent)
    for rank in range(size):
        received = sent[rank * per_rank : (rank + 1) * per_rank]
        wanted = [query * kv_heads // heads for query in range(rank * heads // size, (rank + 1) * heads // size)]
        assert [head for head in received for _ in range(block)] == wanted
