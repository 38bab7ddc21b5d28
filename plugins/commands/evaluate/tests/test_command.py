"""mplug evaluate keeps the contract of commands. The other files test what it measures."""

from mplug_testing import CommandSuite


class TestEvaluate(CommandSuite):
    plugin = "evaluate"
    refused = (
        ("--name", "nowhere"),
        ("nowhere.txt",),
        ("--samples", "0"),
        ("--samples", "most"),
        ("--stride", "4"),
        ("--adapt", "lora"),
        ("--pretrained", "."),
        ("--pretrained", "nowhere", "--data", "text"),
        ("--pretrained", ".", "--name", "both"),
        ("--set", "steps=3"),
    )
