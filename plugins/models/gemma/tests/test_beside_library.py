"""Logits and all gradients of Gemma 3 with images are those of the transformers library, in fp64."""

from typing import Any

import pytest

pytest.importorskip("transformers")

from beside_library import changed
from seeing_gemma import CONFIG, config_of, distances, sample

TOLERANCE = 1e-10
LENGTH = 44
PARTS: dict[str, tuple[int | str, ...]] = {
    "two images": (3, "image", 2, "image"),
    "one image at the beginning": ("image", 3),
    "images without a token between them": (2, "bare", "bare", 4),
    "text alone": (9,),
}


def samples(names: list[str], size: int = 9, length: int = LENGTH) -> list[list[int]]:
    return [sample(PARTS[name], length, seed, size) for seed, name in enumerate(names)]


def test_images_and_text_give_the_librarys_logits_and_gradients() -> None:
    found = distances(CONFIG, samples(list(PARTS)))
    assert len(found) > 70
    assert max(found.values()) < TOLERANCE, found


def test_text_without_an_image_leaves_the_tower_without_a_gradient() -> None:
    found = distances(CONFIG, samples(["text alone"] * 2))
    assert not any(name.startswith("tower.") for name in found)
    assert max(found.values()) < TOLERANCE, found


VARIANTS: dict[str, dict[str, Any]] = {
    "untied, biases, stretched positions": {
        "tie_word_embeddings": False,
        "text_config.attention_bias": True,
        "text_config.rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "text_config.rms_norm_eps": 1e-3,
    },
    "windows of three, all blocks": {
        "text_config.sliding_window": 3,
        "text_config.layer_types": ["sliding_attention"] * 4,
    },
    "another tower": {
        "mm_tokens_per_image": 4,
        "vision_config.hidden_act": "gelu",
        "vision_config.layer_norm_eps": 1e-2,
        "vision_config.num_channels": 1,
        "vision_config.image_size": 8,
        "vision_config.num_attention_heads": 3,
    },
    "patches that are not pooled": {"mm_tokens_per_image": 9, "vision_config.image_size": 6},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_values_of_fields_compute_what_they_compute_in_the_library(variant: str) -> None:
    given = changed(CONFIG, VARIANTS[variant])
    assert config_of(given) != config_of(CONFIG)
    found = distances(given, samples(list(PARTS), given["mm_tokens_per_image"]))
    assert max(found.values()) < TOLERANCE, found
