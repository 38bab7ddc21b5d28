"""mplug serve keeps the contract of commands. The other file tests what it answers."""

from mplug_testing import CommandSuite


class TestServe(CommandSuite):
    plugin = "serve"
    refused = (
        ("--name", "nowhere"),
        ("--pretrained", "nowhere"),
        ("--pretrained", ".", "--name", "both"),
        ("--host", "0.0.0.0"),  # no key
        ("--key", ""),
        ("--port", "70000"),
        ("--lanes", "0"),
        ("--timeout", "0"),
        ("--set", "steps=3"),
    )
