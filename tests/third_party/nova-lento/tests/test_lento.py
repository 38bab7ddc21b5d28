"""Lento keeps the contract of models, under the layouts that do not divide the sequence of its recurrence."""

from mplug.testing import ModelSuite


class TestLento(ModelSuite):
    plugin = "lento"
    settings = {
        "model": {"name": "lento", "num_layers": 3, "hidden_size": 32, "state_size": 24, "vocab_size": 259},
    }
    layouts = ("", "tp2", "pp2", "zero2", "fsdp2", "pp2tp2")
