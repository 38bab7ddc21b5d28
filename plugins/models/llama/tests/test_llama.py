"""Llama keeps the contract of models, and its presets have the published sizes."""

import pytest
from decoder_suites import DecoderSuite
from tiny_models import DECODER


@pytest.mark.wide("families", tests=["test_a_layout_gives_the_run_of_one_process"])
class TestLlama(DecoderSuite):
    plugin = "llama"
    settings = {
        **DECODER,
        "model.tie_embeddings": True,
        "model.rope_scaling": {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    }
    layouts = ("tp2pp2",)
    sizes = {
        "2-7b": 6.738,
        "2-13b": 13.016,
        "2-70b": 68.977,
        "3-8b": 8.030,
        "3-70b": 70.554,
        "3.1-8b": 8.030,
        "3.1-70b": 70.554,
        "3.1-405b": 405.853,
        "3.2-1b": 1.236,
        "3.2-3b": 3.213,
    }
