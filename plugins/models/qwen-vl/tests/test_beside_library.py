"""Logits and all gradients are those of the transformers library, in fp64."""

from typing import Any

import pytest

pytest.importorskip("transformers")

from beside_library import changed
from mplug_qwen_vl.stream import Grid
from seeing_models import CONFIGS, Sample, config_of, distances, sample

TOLERANCE = 1e-10
LENGTH = 60
PARTS = {
    "images of several sizes": (3, Grid(1, 6, 4), 2, Grid(1, 2, 10), 4),
    "a video between text": (2, Grid(2, 6, 4, 1.5), 5),
    "text alone": (9,),
    "one image at the beginning": (Grid(1, 10, 6), 1),
}


def samples(kind: str, names: list[str], length: int = LENGTH, merge: int = 2) -> list[Sample]:
    apart = kind != "2.5"
    return [sample(PARTS[name], length, seed, frames_apart=apart, merge=merge) for seed, name in enumerate(names)]


@pytest.mark.parametrize("kind", CONFIGS)
def test_images_videos_and_text_give_the_librarys_logits_and_gradients(kind: str) -> None:
    found = distances(CONFIGS[kind], samples(kind, list(PARTS)), multiple=7)
    assert len(found) > 70
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("kind", CONFIGS)
def test_text_without_an_image_leaves_the_tower_without_a_gradient(kind: str) -> None:
    found = distances(CONFIGS[kind], samples(kind, ["text alone"] * 2), multiple=3)
    assert not any(name.startswith("tower.") for name in found)
    assert max(found.values()) < TOLERANCE, found


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "2.5: tied inside, gelu, other windows": (
        "2.5",
        {
            "text_config.tie_word_embeddings": True,
            "vision_config.hidden_act": "gelu",
            "vision_config.window_size": 12,
            "vision_config.fullatt_block_indexes": [0, 9],
            "vision_config.rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
        },
    ),
    "2.5: yarn, all blocks with windows, other patches": (
        "2.5",
        {
            "text_config.rope_scaling": {**YARN, "mrope_section": [2, 1, 1]},
            "text_config.hidden_act": "gelu",
            "text_config.rms_norm_eps": 1e-3,
            "vision_config.fullatt_block_indexes": [],
            "vision_config.temporal_patch_size": 1,
            "vision_config.in_channels": 1,
            "vision_config.tokens_per_second": 7,
        },
    ),
    "3: tied, biases, other sections": (
        "3",
        {
            "tie_word_embeddings": True,
            "text_config.attention_bias": True,
            "text_config.rope_scaling": {"rope_type": "default", "mrope_section": [3, 3, 2], "rope_theta": 30.0},
            "vision_config.hidden_act": "gelu",
            "vision_config.deepstack_visual_indexes": [1, 2, 3],
            "vision_config.num_position_embeddings": 4,
        },
    ),
    "3: no DeepStack, one position, yarn": (
        "3",
        {
            "text_config.rope_scaling": {**YARN, "mrope_section": [4, 2, 2], "rope_theta": 1e3},
            "vision_config.deepstack_visual_indexes": [],
            "vision_config.num_position_embeddings": 1,
            "vision_config.depth": 2,
        },
    ),
    "3-moe: experts in every second block": (
        "3-moe",
        {
            "text_config.mlp_only_layers": [],
            "text_config.decoder_sparse_step": 2,
            "text_config.num_experts_per_tok": 3,
            "text_config.head_dim": None,
            "text_config.rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
        },
    ),
}


@pytest.mark.wide(
    "families", quick=["3: tied, biases, other sections", "2.5: yarn, all blocks with windows, other patches"]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_values_of_fields_compute_what_they_compute_in_the_library(variant: str) -> None:
    kind, changes = VARIANTS[variant]
    given = changed(CONFIGS[kind], changes)
    assert config_of(given) != config_of(CONFIGS[kind])
    found = distances(given, samples(kind, list(PARTS)))
    assert max(found.values()) < TOLERANCE, found


def test_patches_that_are_not_merged() -> None:
    given = changed(CONFIGS["3"], {"vision_config.spatial_merge_size": 1})
    names = ["a video between text", "images of several sizes"]
    found = distances(given, samples("3", names, length=90, merge=1))
    assert max(found.values()) < TOLERANCE, found
