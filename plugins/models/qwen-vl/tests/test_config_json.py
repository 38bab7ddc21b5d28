"""Every field of a config.json, and of the two mappings in it, is honoured or refused by name."""

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("transformers")

from beside_library import changed, library_config
from form_claims import assert_null_is_of_library, assert_refused, assert_rows_of_library
from mplug_qwen_vl import QwenVL
from seeing_models import CONFIGS, config_of
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mplug_nn import FormField, PublicForm, written_config

FORMS = {form.model_type: form for form in QwenVL.public_forms}
MAPPINGS = ("text_config", "vision_config")


def parts() -> dict[str, tuple[PublicForm, Any]]:
    """By name, each form and the library's class of it: of the whole, and of the two mappings."""
    found: dict[str, tuple[PublicForm, Any]] = {}
    for kind, form in FORMS.items():
        library = CONFIG_MAPPING[kind]
        found[kind] = form, library
        for name in MAPPINGS:
            row = form.fields[name]
            assert isinstance(row, FormField)
            found[f"{kind}.{name}"] = row.form, CONFIG_MAPPING[row.form.model_type]
    return found


def test_the_forms_are_those_of_the_library() -> None:
    assert set(FORMS) == {given["model_type"] for given in CONFIGS.values()}


def again(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the library makes of a config.json, as it saves it."""
    found: dict[str, Any] = library_config(given).to_dict()
    return found


@pytest.mark.parametrize("name", parts())
def test_every_field_of_the_librarys_class_is_in_one_row_with_the_librarys_default(name: str) -> None:
    assert_rows_of_library(*parts()[name])


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_written_reads_as_the_same_model(kind: str) -> None:
    config = config_of(CONFIGS[kind])
    written = written_config(QwenVL, config)
    assert written["model_type"] == CONFIGS[kind]["model_type"]
    assert config_of(written) == config
    assert config_of(again(written)) == config


@pytest.mark.parametrize("kind", CONFIGS)
def test_null_is_refused_or_means_what_the_library_makes_of_it(kind: str) -> None:
    given = CONFIGS[kind]
    names = [f"{mapping}.{name}" for mapping in MAPPINGS for name in given[mapping]]
    assert_null_is_of_library(names, lambda name: changed(given, {name: None}), config_of, again)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a field of another model": (
        "3",
        {"text_config.query_pre_attn_scalar": 4},
        "in its field 'text_config', its field 'query_pre_attn_scalar' is unknown to the family",
    ),
    "another activation": (
        "3",
        {"vision_config.hidden_act": "relu"},
        "in its field 'vision_config', its field 'hidden_",
    ),
    "another width": (
        "3",
        {"vision_config.out_hidden_size": 64},
        "'vision_config.out_hidden_size' is 64, but the family",
    ),
    "no mapping": ("3", {"vision_config": []}, "its field 'vision_config' is [], but must be a mapping"),
    "a table that is no square": ("3", {"vision_config.num_position_embeddings": 24}, "is 24, which is not a square"),
    "windows of the decoder": (
        "2.5",
        {"text_config.use_sliding_window": True},
        "'use_sliding_window' is true, but the family supports false or null only",
    ),
    "types with windows": (
        "2.5",
        {"text_config.layer_types": ["sliding_attention"] * 4},
        "'layer_types' has blocks with windows",
    ),
    "two sections": (
        "2.5",
        {"text_config.rope_scaling": {"type": "mrope", "mrope_section": [2, 2]}},
        "'rope_scaling.mrope_section' is not a list of three integers",
    ),
    "sections in blocks": (
        "3",
        {"text_config.rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": False}},
        "'rope_scaling.mrope_interleaved' is False, which the library ignores",
    ),
    "other positions of patches": (
        "3",
        {"vision_config.rope_parameters": {"rope_type": "yarn"}},
        "'rope_parameters' has 'yarn', and the family supports axial ones",
    ),
    "gates that are not normalised": ("3-moe", {"text_config.norm_topk_prob": False}, "always normalises the gates"),
    "square experts": ("3-moe", {"text_config.moe_intermediate_size": 16}, "are square matrices beside hidden_size=32"),
    "dropout": ("3", {"text_config.attention_dropout": 0.1}, "'attention_dropout' is 0.1, but the family supports 0.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_in_a_sentence_with_its_name(case: str) -> None:
    kind, changes, sentence = REFUSED[case]
    assert_refused(config_of, changed(CONFIGS[kind], changes), sentence)


RELEASED: dict[str, dict[str, Any]] = {
    "2.5-3b": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "vision_token_id": 151654,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "max_position_embeddings": 128000,
        "max_window_layers": 70,
        "model_type": "qwen2_5_vl",
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.41.2",
        "use_cache": True,
        "use_sliding_window": False,
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": 2048,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vocab_size": 151936,
    },
    "3-32b": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": 64,
            "num_hidden_layers": 64,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000,
            "vocab_size": 151936,
        },
        "video_token_id": 151656,
        "vision_config": {
            "deepstack_visual_indexes": [8, 16, 24],
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 5120,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
        },
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    },
}
"""Two released files: a flat one of the second generation, and a nested one of the third."""


@pytest.mark.parametrize("preset", RELEASED)
def test_a_released_file_describes_the_preset(preset: str) -> None:
    model = QwenVL.presets[preset]["model"]
    assert config_of(RELEASED[preset]).computes_like(QwenVL.Config(**model))
