"""Every field of a config.json of Gemma 3 with images, and of its two mappings, is honoured or refused by name."""

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("transformers")

from beside_library import changed, library_config
from form_claims import assert_null_is_of_library, assert_refused, assert_rows_of_library
from mplug_gemma import Gemma
from seeing_gemma import CONFIG, config_of
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mplug_nn import FormField, PublicForm, written_config

MAPPINGS = ("text_config", "vision_config")
(FORM,) = (form for form in Gemma.public_forms if form.model_type == "gemma3")


def parts() -> dict[str, tuple[PublicForm, Any]]:
    """By name, each form and the library's class of it: of the whole, and of the two mappings."""
    found: dict[str, tuple[PublicForm, Any]] = {"gemma3": (FORM, CONFIG_MAPPING["gemma3"])}
    for name in MAPPINGS:
        row = FORM.fields[name]
        assert isinstance(row, FormField)
        found[name] = row.form, CONFIG_MAPPING[row.form.model_type]
    return found


@pytest.mark.parametrize("name", parts())
def test_every_field_of_the_librarys_class_is_in_one_row_with_the_librarys_default(name: str) -> None:
    assert_rows_of_library(*parts()[name])


def again(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the library makes of a config.json, as it saves it."""
    found: dict[str, Any] = library_config(given).to_dict()
    return found


def test_what_is_written_reads_as_the_same_model() -> None:
    config = config_of(CONFIG)
    written = written_config(Gemma, config)
    assert written["architectures"] == ["Gemma3ForConditionalGeneration"]
    assert config_of(written) == config
    assert config_of(again(written)) == config


@pytest.mark.parametrize("preset", [name for name in Gemma.presets if name.endswith("-vision")])
def test_a_preset_is_written_and_read_as_the_same_model(preset: str) -> None:
    config = Gemma.Config(**Gemma.presets[preset]["model"])
    written = written_config(Gemma, config)
    assert written["model_type"] == "gemma3"
    assert config_of(written).computes_like(config)


def test_a_decoder_of_text_alone_is_written_as_before() -> None:
    assert written_config(Gemma, config_of(CONFIG).of_text())["architectures"] == ["Gemma3ForCausalLM"]


def test_a_tower_beside_the_decoder_of_gemma_2_has_no_published_form() -> None:
    config = config_of(CONFIG)
    with pytest.raises(ValueError, match=r"cannot express model\.qk_norm=False"):
        written_config(Gemma, config.model_copy(update={"qk_norm": False}))
    with pytest.raises(ValueError, match=r"cannot express model\.logit_soft_cap=3\.0"):
        written_config(Gemma, config.model_copy(update={"logit_soft_cap": 3.0}))


def test_what_the_tower_does_not_compute_does_not_prevent_an_export() -> None:
    config = config_of(changed(CONFIG, {}))
    assert config.vision is not None
    vision = config.vision.model_copy(update={"typical_images": 5, "init_std": 0.5, "blank_line_token": None})
    written = written_config(Gemma, config.model_copy(update={"vision": vision}))
    assert written == written_config(Gemma, config)


def test_null_is_refused_or_means_what_the_library_makes_of_it() -> None:
    names = [f"{mapping}.{name}" for mapping in MAPPINGS for name in CONFIG[mapping].keys() - {"model_type"}]
    assert_null_is_of_library(names, lambda name: changed(CONFIG, {name: None}), config_of, again)


def test_the_short_config_of_the_released_folders_is_the_preset() -> None:
    """The mappings of the 4B folder state only what differs from the library's defaults."""
    given = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    }
    assert config_of(given).computes_like(Gemma.Config(**Gemma.presets["3-4b-vision"]["model"]))


STRANGE: list[Any] = [
    None,
    True,
    0,
    -1,
    7,
    1.5,
    1e308,
    float("nan"),
    float("inf"),
    1 << 70,
    10**400,
    "",
    "silu",
    [],
    [1],
]
STRANGE += [{}, {"a": {}}, {"rope_type": "yarn"}, {"full_attention": {"rope_type": "linear"}}]


@pytest.mark.wide("fuzz")
def test_any_value_of_any_field_is_read_or_refused() -> None:
    """ValueError is a refusal; another exception would be a traceback of the family."""
    inside = {f"{name}.{field}" for name in MAPPINGS for field in parts()[name][0].fields}
    refused = 0
    for name in sorted({*FORM.fields} | inside):
        for value in STRANGE:
            try:
                config_of(changed(CONFIG, {name: value}))
            except ValueError:
                refused += 1
    assert refused > 500


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a field of another model": (
        {"vision_config.qk_norm": True},
        "in its field 'vision_config', its field 'qk_norm' is unknown to the family",
    ),
    "another activation": (
        {"vision_config.hidden_act": "relu"},
        "in its field 'vision_config', its field 'hidden_act'",
    ),
    "a pooling head": ({"vision_config.vision_use_head": True}, "'vision_use_head' is true, or absent"),
    "no mapping": ({"vision_config": []}, "its field 'vision_config' is [], but must be a mapping"),
    "a soft cap that the library ignores": (
        {"text_config.final_logit_softcapping": 30.0},
        "'final_logit_softcapping' is 30.0, but the family supports null only (the library ignores other values",
    ),
    "dropout": ({"vision_config.attention_dropout": 0.1}, "'attention_dropout' is 0.1, but the family supports 0.0"),
    "sides of an image": ({"vision_config.image_size": [12, 12]}, "'image_size' is [12, 12], but"),
    "text that sees later tokens": (
        {"text_config.use_bidirectional_attention": True},
        "'use_bidirectional_attention' is true, but the family supports",
    ),
    "two numbers of a token": ({"image_token_id": 3}, "'image_token_index' and 'image_token_id' are one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_in_a_sentence_with_its_name(case: str) -> None:
    changes, sentence = REFUSED[case]
    assert_refused(config_of, changed(CONFIG, changes), sentence)
