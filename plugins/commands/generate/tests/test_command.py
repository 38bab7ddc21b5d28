"""mplug generate keeps the contract of commands. The other files test what it samples."""

from mplug_testing import CommandSuite


class TestGenerate(CommandSuite):
    plugin = "generate"
    refused = (
        ("--name", "nowhere"),
        ("--tokens", "0"),
        ("--temperature", "nan"),
        ("--top-p", "0"),
        ("--chat",),
        ("--stop", ""),
        ("--pretrained", "nowhere"),
        ("--pretrained", ".", "--name", "both"),
        ("--image", "nowhere.png"),
        ("--prompts", "nowhere.txt"),
        ("--output", "texts.jsonl"),
        ("--set", "steps=3"),
    )
