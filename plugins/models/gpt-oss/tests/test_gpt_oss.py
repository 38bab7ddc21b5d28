"""gpt-oss keeps the contract of models, and its presets have the published sizes."""

import pytest
import torch
from mplug_gpt_oss import GptOss

from mplug import Model
from mplug.testing import ModelSuite


class TestGptOss(ModelSuite):
    plugin = "gpt-oss"
    settings = {
        "kernels.attention": None,
        "model.num_layers": 3,
        "model.hidden_size": 32,
        "model.num_attention_heads": 4,
        "model.num_kv_heads": 2,
        "model.ffn_hidden_size": 48,
        "model.vocab_size": 259,
        "model.rope_theta": 1e4,
        "model.init_std": 0.06,
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


@pytest.mark.wide("layouts")
class TestGptOssUnderLayouts(TestGptOss):
    layouts = (
        "tp2",
        "pp2",
        "cp2 parallel.cp.method=ulysses",
        "tp2pp2",
        "zero2",
        "fsdp2",
        "ep2",
        "tp2ep2",
        "tp2ep2 parallel.tp.sequence_parallel=false",
        "etp2",
    )


SIZES = {
    "20b": 20.915,
    "120b": 116.829,
}


def on_meta(preset: str) -> Model:
    with torch.device("meta"):
        return GptOss(GptOss.Config(**GptOss.presets[preset]["model"])).build_model()


@pytest.mark.parametrize(("name", "billions"), SIZES.items())
def test_a_preset_has_its_published_parameters(name: str, billions: float) -> None:
    assert set(SIZES) == set(GptOss.presets)
    found = sum(parameter.numel() for parameter in on_meta(name).parameters().values())
    assert found / 1e9 == pytest.approx(billions, abs=6e-4)
