"""The formats of Hugging Face's libraries pass the suite for formats."""

from mplug_testing import FormatSuite


class TestHuggingFace(FormatSuite):
    plugin = "huggingface"
    settings = {"model.name": "llama", "model.qk_norm": False, "model.ffn_hidden_size": 48}


class TestPEFT(FormatSuite):
    plugin = "peft"
    writes_models = False
