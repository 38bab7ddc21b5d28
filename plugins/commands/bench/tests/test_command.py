"""mplug bench keeps the contract of commands. tests/test_bench.py tests what it measures."""

from mplug_testing import CommandSuite


class TestBench(CommandSuite):
    plugin = "bench"
    refused = (
        ("--steps", "0"),
        ("--against", "nowhere.py"),
        ("--variant", "trainer.stpes=1"),
        ("--set", "trainer.global_batch_size=7", "--set", "trainer.micro_batch_size=2"),
    )
