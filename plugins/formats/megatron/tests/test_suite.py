"""The format of Megatron-LM passes the suite for formats."""

from pathlib import Path

from mplug_testing import FormatSuite


class TestMegatron(FormatSuite):
    plugin = "megatron"
    folder = str(Path(__file__).parent / "data" / "llama")
