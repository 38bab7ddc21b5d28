"""gpt-oss keeps the contract of models, and its presets have the published sizes."""

import pytest
from decoder_suites import FurtherDecoderSuite
from tiny_models import DECODER


@pytest.mark.wide("families", tests=["test_a_layout_gives_the_run_of_one_process"])
class TestGptOss(FurtherDecoderSuite):
    plugin = "gpt-oss"
    settings = {
        "kernels.attention": None,
        **DECODER,
        "model.head_dim": 16,
        "model.window": 4,
        "model.num_experts": 4,
        "model.num_experts_per_token": 2,
        "model.rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "truncate": False,
        },
    }
    layouts = ("tp2ep2",)
    sizes = {"20b": 20.915, "120b": 116.829}
