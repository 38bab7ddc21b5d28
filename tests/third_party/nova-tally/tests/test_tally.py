"""Tally keeps the contract of commands."""

from mplug_testing import CommandSuite


class TestTally(CommandSuite):
    plugin = "tally"
    refused = ((), ("--runs", "nowhere"), ("--by", "colour"))
