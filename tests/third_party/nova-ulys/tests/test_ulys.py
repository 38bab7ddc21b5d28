"""Ulysses passes the suite of strategies; which KV heads travel is checked by counting."""

from mplug_testing import ParallelSuite


class TestUlysses(ParallelSuite):
    plugin = "ulys"
    refused = {
        "ulys8": ("ulys=8", "4 query heads"),
        "ulys4tp2": ("ulys=4", "2 query heads", "use ulys=1 or 2"),
        "ulys3": ("ulys=3", "trainer.seq_length", "16"),
    }
