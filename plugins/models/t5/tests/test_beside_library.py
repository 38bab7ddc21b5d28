"""Logits and all gradients are those of the transformers library, in fp64; so are the ranges of distances."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from t5_models import TINY, config_of, distances

from mplug_nn.relative import range_of

TOLERANCE = 1e-10
CASES: dict[str, dict[str, Any]] = {
    "v1.1": TINY,
    "first": {**TINY, "feed_forward_proj": "relu", "tie_word_embeddings": True},
    "other numbers": {
        **TINY,
        "num_decoder_layers": 4,
        "feed_forward_proj": "gated-silu",
        "layer_norm_epsilon": 1e-2,
        "relative_attention_num_buckets": 12,
        "relative_attention_max_distance": 7,
    },
    "tied, and not scaled": {**TINY, "tie_word_embeddings": True, "scale_decoder_outputs": False},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_the_library(case: str) -> None:
    found = distances(CASES[case])
    assert len(found) >= 35
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_a_config_of_its_own(case: str) -> None:
    others = [config_of(given) for name, given in CASES.items() if name != case]
    assert config_of(CASES[case]) not in others


@pytest.mark.parametrize("causal", [True, False], ids=["decoder", "encoder"])
@pytest.mark.parametrize(("number", "reach"), [(32, 128), (8, 20), (12, 33)])
def test_ranges_of_distances_are_those_of_the_library(number: int, reach: int, causal: bool) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    places = torch.arange(-3 * reach, 3 * reach + 1)
    expected = T5Attention._relative_position_bucket(
        places, bidirectional=not causal, num_buckets=number, max_distance=reach
    )
    assert [range_of(place, number, reach, causal=causal) for place in places.tolist()] == expected.tolist()
