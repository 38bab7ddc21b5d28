"""T5 keeps the contract of models, and its presets have the published sizes."""

import pytest
import torch
from click.testing import CliRunner
from mplug_t5 import T5
from t5_models import SPANS

from mplug.cli import main
from mplug_testing import ModelSuite


class TestT5(ModelSuite):
    plugin = "t5"
    settings = {
        "model.num_layers": 2,
        "model.num_decoder_layers": 2,
        "model.hidden_size": 16,
        "model.head_dim": 4,
        "model.ffn_hidden_size": 48,
        "model.bias_ranges": 8,
        "model.bias_reach": 10,
        "model.encoder_length": 23,
        "model.vocab_size": 209,
        **SPANS,
    }
    layouts = ()
    positions = "ignored"
    without_effect = {
        "encoder_length": "an estimate, which the FLOPs of cross-attention follow",
        "start_token": "sampling begins with it; test_generation.py samples",
    }


# Sizes.


@pytest.mark.parametrize(
    ("preset", "number"),
    [
        ("small", 60_506_624),
        ("base", 222_903_552),
        ("large", 737_668_096),
        ("3b", 2_851_598_336),
        ("11b", 11_307_321_344),
        ("v1.1-small", 76_961_152),
        ("v1.1-base", 247_577_856),
        ("v1.1-large", 783_150_080),
        ("v1.1-xl", 2_849_757_184),
        ("v1.1-xxl", 11_135_332_352),
    ],
)
def test_a_preset_has_the_published_number_of_parameters(preset: str, number: int) -> None:
    with torch.device("meta"):
        model = T5(T5.Config(**T5.presets[preset]["model"])).build_model()
    assert sum(parameter.numel() for parameter in model.parameters().values()) == number


def test_explain_counts_the_work_of_both_sequences() -> None:
    words = ["--model", "t5", "--preset", "tiny", "--data", "spans", "--set", "trainer.seq_length=14"]
    words += ["--set", "data.of.name=mock", "--set", "data.of.vocab_size=400", "--set", "data.end_token=1"]
    words += ["--set", "data.encoder_length=64", "--set", "trainer.global_batch_size=8"]
    found = CliRunner().invoke(main, ["explain", *words])
    assert found.exit_code == 0, found.output
    weights = 2 * (192 * 64 + 64 * 64 + 256 * 64 + 64 * 128) + 2 * 128 * 64  # the encoder, and the keys of its output
    pairs = 2 * 3 * 2 * 2 * (32 + 32)  # two blocks of two heads, in both directions
    assert f"all of 512 encoder_tokens (an estimate)  {8 * (6 * weights * 64 + pairs * 64**2):,}" in found.output
