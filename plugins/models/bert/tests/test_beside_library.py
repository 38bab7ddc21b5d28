"""Logits and all gradients are those of the transformers library, in fp64."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from encoder_models import CONFIGS, B, S, config_of, distances

TOLERANCE = 1e-10
MODERN = CONFIGS["modernbert"]
CASES: dict[str, dict[str, Any]] = {
    **CONFIGS,
    "bert, untied, another activation": {
        **CONFIGS["bert"],
        "tie_word_embeddings": False,
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-2,
    },
    "roberta, another padding token": {**CONFIGS["roberta"], "pad_token_id": 2},
    "modernbert, all biases, another pattern, untied": {
        **MODERN,
        "norm_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "classifier_bias": True,
        "decoder_bias": False,
        "tie_word_embeddings": False,
        "hidden_activation": "silu",
        "classifier_activation": "gelu_new",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 50.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
    },
    "modernbert, an older folder": {
        **MODERN,
        "global_attn_every_n_layers": 2,
        "global_rope_theta": 300.0,
        "local_rope_theta": 30.0,
        "local_attention": 5,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_the_library(case: str) -> None:
    found = distances(CASES[case])
    assert len(found) >= 30
    assert max(found.values()) < TOLERANCE, found


def test_token_types_give_the_librarys_logits_and_gradients() -> None:
    types = (torch.arange(S) >= S // 2).long().expand(B, S)
    found = distances(CONFIGS["bert"], types)
    assert max(found.values()) < TOLERANCE, found
    assert found["logits"] != distances(CONFIGS["bert"])["logits"]


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_a_config_of_its_own(case: str) -> None:
    others = [config_of(given) for name, given in CASES.items() if name != case]
    assert config_of(CASES[case]) not in others
