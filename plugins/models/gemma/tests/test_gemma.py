"""Gemma keeps the contract of models, and its presets have the published sizes."""

import pytest
from decoder_suites import FurtherDecoderSuite
from mplug_gemma import Gemma
from tiny_models import DECODER

from mplug_testing import ModelSuite


@pytest.mark.wide("families", tests=["test_a_layout_gives_the_run_of_one_process"])
class TestGemma(FurtherDecoderSuite):
    plugin = "gemma"
    settings = {
        "kernels.attention": None,
        **DECODER,
        "model.head_dim": 16,
        "model.qk_norm": True,
        "model.attention_soft_cap": 3.0,
        "model.logit_soft_cap": 3.0,
        "model.attention_scale": 0.2,
        "model.window": 4,
        "model.attention_types": ["window", "full"],
        "model.window_rope_theta": 100.0,
        "model.rope_scaling": {"type": "linear", "factor": 8.0},
    }
    layouts = ("tp2",)
    sizes = {
        "2-2b": 2.614,
        "2-9b": 9.242,
        "2-27b": 27.227,
        "3-270m": 0.268,
        "3-1b": 1.0,
        "3-4b": 3.88,
        "3-12b": 11.766,
        "3-27b": 27.009,
        "3-4b-vision": 4.3,
        "3-12b-vision": 12.187,
        "3-27b-vision": 27.432,
        "tiny-vision": 0.001,
    }
    without_effect = {"vision": "a tower needs images; test_beside_library.py tests it"}
    reference = ModelSuite.reference  # the library has no Gemma with both soft caps and norms of queries and keys


class TestGemma3(TestGemma):
    """Without the soft caps of Gemma 2, which the library's Gemma 3 does not have."""

    settings = {name: value for name, value in TestGemma.settings.items() if "soft_cap" not in name}
    settings |= {"model.hidden_size": 16}  # the library keeps its square root in fp32
    layouts = ()
    checks_fields = False
    sizes = {}
    reference = FurtherDecoderSuite.reference


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"vocab_size": 503}, "vision: image_token=503 has no row in a table of 503 tokens"),
        ({"num_mtp_layers": 1}, "num_mtp_layers=1 cannot be used with a tower"),
    ],
)
def test_a_decoder_that_does_not_fit_its_tower_is_refused(change: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Gemma.Config(**{**Gemma.presets["tiny-vision"]["model"], **change})
