"""Logits and all gradients are those of the transformers library, in fp64."""

from typing import Any

import pytest

pytest.importorskip("transformers")

from beside_library import changed
from llava_models import CONFIGS, TILED, config_of, distances, distances_of, tiled_micro_batch

TOLERANCE = 1e-10


@pytest.mark.parametrize("kind", CONFIGS)
def test_pictures_and_text_give_the_librarys_logits_and_gradients(kind: str) -> None:
    found = distances(CONFIGS[kind], (2, 0, 1, 3))
    assert len(found) > 40
    assert max(found.values()) < TOLERANCE, found


def test_text_without_a_picture_leaves_the_tower_without_a_gradient() -> None:
    found = distances(CONFIGS["llama"], (0, 0))
    assert not any(name.startswith("tower.") for name in found)
    assert max(found.values()) < TOLERANCE, found


VARIANTS: dict[str, dict[str, Any]] = {
    "the last block, and the class row": {
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "image_seq_length": 17,
    },
    "a block by its number, other activations, no biases": {
        "vision_feature_layer": 2,
        "projector_hidden_act": "gelu_pytorch_tanh",
        "multimodal_projector_bias": False,
        "vision_config.hidden_act": "gelu",
        "vision_config.layer_norm_eps": 1e-2,
    },
    "pixels beyond the last patch": {"vision_config.patch_size": 3, "image_seq_length": 4},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_values_of_fields_compute_what_they_compute_in_the_library(variant: str) -> None:
    given = changed(CONFIGS["llama"], VARIANTS[variant])
    assert config_of(given) != config_of(CONFIGS["llama"])
    found = distances(given, (1, 2))
    assert max(found.values()) < TOLERANCE, found


MEDIA = [(1, 20, 9), (3, 6, 11)], [], [(1, 9, 30), (1, 5, 5)], [(1, 17, 16)], [(3, 8, 8)]
"""One picture and a video, text alone, two pictures, a picture of 2 x 2 tiles that is resampled, a video."""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "vision_config": {**CONFIGS["llama"]["vision_config"], "image_size": 10, "patch_size": 3},
            "image_grid_pinpoints": [[10, 20], [30, 20]],
            "vision_aspect_ratio": "anyres_max_1",
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        },
    ],
    ids=["siglip", "clip"],
)
def test_tiles_and_videos_give_the_librarys_logits_and_gradients(changes: dict[str, Any]) -> None:
    given = changed(TILED, changes)
    found = distances_of(given, tiled_micro_batch(config_of(given), MEDIA, 130))
    assert {"join.newline", "tower.projector.up.weight"} < set(found)
    assert max(found.values()) < TOLERANCE, found


def test_text_alone_leaves_tower_and_line_ends_without_a_gradient() -> None:
    found = distances_of(TILED, tiled_micro_batch(config_of(TILED), [[], []], 20), is_blind=True)
    assert not any(name.startswith(("tower.", "join.")) for name in found)
    assert max(found.values()) < TOLERANCE, found
