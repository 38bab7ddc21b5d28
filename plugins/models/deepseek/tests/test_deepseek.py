"""DeepSeek keeps the contract of models, and its presets have the published sizes."""

import pytest
from decoder_suites import DecoderSuite
from tiny_models import LATENT_EXPERTS


@pytest.mark.wide("families", tests=["test_a_layout_gives_the_run_of_one_process"], quick=["cp2"])
class TestDeepseek(DecoderSuite):
    plugin = "deepseek"
    settings = {
        **LATENT_EXPERTS,
        "model.num_layers": 3,
        "model.expert_bias_rate": 0.01,
        "model.rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
        },
    }
    layouts = ("tp2pp2", "cp2")
    own_examples = {
        **{name: [True] for name in ("qk_norm", "qkv_bias", "attention_out_bias", "attention_output_gate")},
        "num_kv_heads": [2],
        "head_dim": [8],
        "window_rope_theta": [100.0],
    }
    """Latent attention refuses these."""
    own_beside = {"window_rope_theta": {}}
    sizes = {"v2-lite": 15.706, "v2": 235.741, "v3": 671.026}

    @pytest.mark.wide("families")
    def test_every_field_of_its_config_has_an_effect(self) -> None:
        super().test_every_field_of_its_config_has_an_effect()
