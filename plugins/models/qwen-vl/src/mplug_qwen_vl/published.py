"""The config.json of Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE: fields beside, and in, two nested mappings. No torch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mplug_nn import (
    SHARED_FIELDS,
    FormField,
    PublicField,
    PublicForm,
    ReadField,
    UnusedField,
    Values,
    tied_fields,
)
from mplug_qwen_vl.preparation import SECOND_FILES, THIRD_FILES
from mplug_qwen_vl.published_decoder import SECOND_TEXT, SPARSE_TEXT, THIRD_TEXT
from mplug_qwen_vl.published_tower import SECOND_TOWER, third_tower_form

if TYPE_CHECKING:
    from mplug_qwen_vl.config import QwenVLConfig

TEXT, VISION = "text_config", "vision_config"
TOKEN = Values.integer(0)
IDS = {
    "image_token_id": ("image_token", 151655),
    "video_token_id": ("video_token", 151656),
    "vision_start_token_id": ("start_token", 151652),
    "vision_end_token_id": ("end_token", 151653),
}
"""The field of a token's number -> our setting of the tower, and the library's default."""


def _whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of tokens; the tower's result must be as wide as the decoder."""
    tokens = {ours: values[name] for name, (ours, _) in IDS.items()}
    width, expected = values[VISION]["out_hidden_size"], values[TEXT]["hidden_size"]
    if width != expected:
        raise ValueError(
            f"its field '{VISION}.out_hidden_size' is {width}, but the family supports {expected} only, which is "
            f"'{TEXT}.hidden_size'"
        )
    return {"vision": tokens}


def _second_whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """Older folders say in the decoder's mapping whether embedding and output projection are one table."""
    tied = [values["tie_word_embeddings"], values[TEXT]["tie_word_embeddings"]]
    return {"tie_embeddings": any(tied), **_whole(values)}


def _written_whole(config: "QwenVLConfig") -> dict[str, Any]:
    vision = config.vision
    return {} if vision is None else {name: getattr(vision, ours) for name, (ours, _) in IDS.items()}


def _written_second_whole(config: "QwenVLConfig") -> dict[str, Any]:
    return {**_written_whole(config), "tie_word_embeddings": config.tie_embeddings}


def _width(config: "QwenVLConfig") -> dict[str, Any]:
    return {"out_hidden_size": config.hidden_size}


def _fields(text: PublicForm, tower: PublicForm) -> dict[str, PublicField]:
    return {
        **SHARED_FIELDS,
        TEXT: FormField(text),
        VISION: FormField(tower, "vision", altering=True, write=_width),
        **{name: ReadField(default, TOKEN) for name, (_, default) in IDS.items()},
        "vision_token_id": UnusedField("the library has no such field"),
    }


SECOND = PublicForm(
    preparation=SECOND_FILES,
    architecture="Qwen2_5_VLForConditionalGeneration",
    model_type="qwen2_5_vl",
    fields={**_fields(SECOND_TEXT, SECOND_TOWER), "tie_word_embeddings": ReadField(False, Values.flag())},
    settings=_second_whole,
    write=_written_second_whole,
    flat=TEXT,
)
"""Qwen2.5-VL; the released folders have the fields of the decoder beside the tower's mapping."""
DENSE = PublicForm(
    preparation=THIRD_FILES,
    architecture="Qwen3VLForConditionalGeneration",
    model_type="qwen3_vl",
    fields={**_fields(THIRD_TEXT, third_tower_form("qwen3_vl_vision")), **tied_fields(False)},
    settings=_whole,
    write=_written_whole,
)
SPARSE = PublicForm(
    preparation=THIRD_FILES,
    architecture="Qwen3VLMoeForConditionalGeneration",
    model_type="qwen3_vl_moe",
    fields={**_fields(SPARSE_TEXT, third_tower_form("qwen3_vl_moe_vision")), **tied_fields(False)},
    settings=_whole,
    write=_written_whole,
)
FORMS = (DENSE, SPARSE, SECOND)
