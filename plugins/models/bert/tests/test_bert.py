"""BERT and ModernBERT keep the contract of models, and their presets have the published sizes."""

from typing import Any

import pytest
import torch
from mplug_bert import Bert, ModernBert

from mplug_testing import ModelSuite

SEQUENCES = {"model.head": "sequences", "model.labels": ["a", "b", "c"], "data.vocab_size": 3, "data.documents": 3}
OF_HEADS = {
    "labels": SEQUENCES,
    "classifier_dropout": SEQUENCES,
    "pooling": SEQUENCES,
}
"""Field -> settings under which it has an effect."""
OTHERS = [("c", "b", "a", "d")]


SIZES = {
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.num_layers": 3,
    "model.ffn_hidden_size": 48,
    "model.vocab_size": 259,
}


class EncoderSuite(ModelSuite):
    layouts = ()
    causal = False
    beside = OF_HEADS
    without_effect = {"temperature": "it needs a step of one micro batch; test_embedding.py tests it"}

    @pytest.mark.wide("suites")
    def test_every_field_of_its_config_has_an_effect(self) -> None:
        super().test_every_field_of_its_config_has_an_effect()


class TestBert(EncoderSuite):
    plugin = "bert"
    settings = {**SIZES, "model.max_position_embeddings": 20}
    positions = "absolute"
    examples = {
        "position_offset": [2],
        "head": ["embedding"],
        "classifier_dropout": [0.3],
        "labels": OTHERS,
    }


class TestModernBert(EncoderSuite):
    plugin = "modernbert"
    settings = {**SIZES, "model.window": 3}
    positions = "relative"
    examples = {
        "attention_types": [("full", "window")],
        "head": ["embedding"],
        "classifier_dropout": [0.3],
        "labels": OTHERS,
    }


# Sizes.


@pytest.mark.parametrize(
    ("family", "preset", "number"),
    [
        (Bert, "base", 109_514_298),
        (Bert, "large", 335_174_458),
        (Bert, "roberta-base", 124_697_433),
        (Bert, "roberta-large", 355_412_057),
        (ModernBert, "base", 149_655_232),
        (ModernBert, "large", 395_881_664),
    ],
)
def test_a_preset_has_the_published_number_of_parameters(family: Any, preset: str, number: int) -> None:
    with torch.device("meta"):
        model = family(family.Config(**family.presets[preset]["model"])).build_model()
    assert sum(parameter.numel() for parameter in model.parameters().values()) == number
