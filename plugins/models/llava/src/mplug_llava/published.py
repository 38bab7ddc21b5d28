"""The config.json of LLaVA: two nested mappings, of which that of the decoder is another family's. No torch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mplug_llava.preparation import SQUARES, TILES
from mplug_llava.published_towers import CLIP, CLIP_PREPARATION, PLAIN, SIGLIP
from mplug_llava.tiling import TilingConfig
from mplug_nn import SHARED_FIELDS, FormField, FoundFamily, PublicForm, ReadField, UnusedField, Values, family_field

if TYPE_CHECKING:
    from mplug_llava.config import LlavaConfig

TEXT, VISION = "text_config", "vision_config"
SIZE = Values.integer()
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
"""Fields of a tower's mapping."""
FEATURES = {"default": "patches", "full": "all"}
"""The library's choice of rows of a picture, which begins with a class row -> vision.features."""


UNTIED = f"its field 'tie_word_embeddings' is true and that of '{TEXT}' is not; the family supports equal values"


def _whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """What belongs to the tower beside its mapping."""
    decoder: FoundFamily = values[TEXT]
    if values["tie_word_embeddings"] and not decoder.config.embedding_config().tied:
        raise ValueError(UNTIED)
    settings = _of_tower(values)
    tower = values[VISION]
    rows = (tower["image_size"] // tower["patch_size"]) ** 2 + (settings["features"] == "all")
    if values["image_seq_length"] not in (None, rows):
        raise ValueError(
            f"its field 'image_seq_length' is {values['image_seq_length']}, but the family supports {rows} only, which "
            f"is the number of rows of a picture"
        )
    return {"vision": settings}


def _of_tower(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the tower beside its mapping; the decoder must embed tokens as the library does."""
    decoder: FoundFamily = values[TEXT]
    _refuse_other_embedding(decoder.config, decoder.name)
    tower, strategy = values[VISION], values["vision_feature_select_strategy"]
    has_class_row = getattr(tower, "form", CLIP).implied["class_row"]
    if not has_class_row and strategy == "default":
        raise ValueError(
            f"its field 'vision_feature_select_strategy' is 'default', which drops the first patch of a '{VISION}' "
            f'without a class row; the family supports "full" only'
        )
    return {
        "feature_layer": values["vision_feature_layer"],
        "features": FEATURES[strategy] if has_class_row else "patches",
    }


def _refuse_other_embedding(config: Any, name: str) -> None:
    """Raise ValueError unless the decoder's embedding is the table of tokens alone, in which pictures stand."""
    described = getattr(config, "embedding_config", None)
    made = described() if callable(described) else None
    if made is None or made.num_positions is not None or made.scale != 1.0 or made.dropout:
        raise ValueError(
            f"its decoder is one of '{name}' that scales embeddings or adds positions or dropout to them; the library "
            f"does so after pictures stand in the text, and the family before"
        )


def _written(config: "LlavaConfig") -> dict[str, Any]:
    _refuse_other_embedding(config.decoder.config, config.decoder.name)
    vision = config.vision
    theirs = {ours: name for name, ours in FEATURES.items()}
    return {
        "vision_feature_layer": vision.feature_layer,
        "vision_feature_select_strategy": theirs[vision.features] if vision.class_row else "full",
        "image_seq_length": len(vision.seen_rows),
        "tie_word_embeddings": config.decoder.config.embedding_config().tied,
    }


CLIP_LLAVA = PublicForm(
    architecture="LlavaForConditionalGeneration",
    model_type="llava",
    fields={
        **SHARED_FIELDS,
        TEXT: family_field("decoder", "llama"),
        VISION: FormField(CLIP, "vision", others=(SIGLIP,)),
        "image_token_index": ReadField(32000, Values.integer(0), ("image_token",)),
        "image_seq_length": ReadField(576, SIZE.or_null),
        "projector_hidden_act": ReadField("gelu", Values.one_of(*PLAIN), ("projector_activation",), PLAIN),
        "multimodal_projector_bias": ReadField(True, Values.flag(), ("projector_bias",)),
        "vision_feature_select_strategy": ReadField("default", Values.one_of(*FEATURES)),
        "vision_feature_layer": ReadField(-2, Values(lambda value: type(value) is int and value != 0, "an integer")),
        "tie_word_embeddings": ReadField(False, Values.flag()),
        "ignore_index": UnusedField("the label of positions without a target in the library's loss"),
        "vocab_size": UnusedField("older releases repeat the decoder's size; the mapping of the decoder decides"),
        "pad_token_id": UnusedField("no layer uses the number of this token"),
    },
    aliases={"image_token_id": "image_token_index"},
    settings=_whole,
    write=_written,
    preparation=SQUARES,
    presumed=frozenset(CLIP_PREPARATION),
)
"""LLaVA-1.5."""


def _one_vision(values: Mapping[str, Any]) -> dict[str, Any]:
    """What belongs to the tower beside its mapping, and the tiles. The decoder alone decides whether it is tied."""
    settings = _of_tower(values)
    if settings["features"] == "all":
        raise ValueError(
            f"its field 'vision_feature_select_strategy' is 'full', which keeps the class row of its '{VISION}'; the "
            f'library then finds no grid of patches, and the family supports "default" only'
        )
    resolutions = values["image_grid_pinpoints"]
    tiling = {
        "resolutions": ONE_VISION_RESOLUTIONS if resolutions is None else tuple(map(tuple, resolutions)),
        "max_tiles": int(values["vision_aspect_ratio"].removeprefix(ANYRES)),
        "video_token": values["video_token_index"],
    }
    decoder: FoundFamily = values[TEXT]
    if values["tie_word_embeddings"] and not decoder.config.embedding_config().tied:
        raise ValueError(UNTIED)
    return {"vision": settings, "tiling": tiling}


def _written_one_vision(config: "LlavaConfig") -> dict[str, Any]:
    tiling = config.tiling
    if tiling is None:
        raise ValueError("it has tiles, and model.tiling is null")
    shared = _written(config)
    return {
        **{name: value for name, value in shared.items() if name != "image_seq_length"},
        "image_grid_pinpoints": [list(size) for size in tiling.resolutions],
        "vision_aspect_ratio": f"{ANYRES}{tiling.max_tiles}",
        "video_token_index": tiling.video_token,
    }


ANYRES = "anyres_max_"
ONE_VISION_RESOLUTIONS = TilingConfig().resolutions


def _in_one_vision(form: PublicForm, **training: Any) -> PublicForm:
    """The form of a tower in a folder of LLaVA-OneVision, whose preprocessor_config.json has the colours.

    The library has other sizes for a tower without a mapping than for one with an empty mapping, so the form needs
    them.
    """
    fields = {
        name: replace(row, required=True) if isinstance(row, ReadField) and name in SIZES else row
        for name, row in form.fields.items()
    }
    return replace(form, fields=fields, implied={**form.implied, "fit": "stretch"}, training=training)


def _is_resolutions(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(one, list | tuple) and len(one) == 2 and all(map(SIZE.accepts, one)) for one in value)
    )


def _is_anyres(value: Any) -> bool:
    number = value.removeprefix(ANYRES) if isinstance(value, str) and value.startswith(ANYRES) else ""
    return number.isascii() and number.isdecimal() and int(number) > 0


RESOLUTIONS = Values(_is_resolutions, "a list of heights and widths")
ONE_VISION = PublicForm(
    architecture="LlavaOnevisionForConditionalGeneration",
    model_type="llava_onevision",
    fields={
        **{name: row for name, row in CLIP_LLAVA.fields.items() if name != "image_seq_length"},
        TEXT: family_field("decoder", "qwen2"),
        VISION: FormField(_in_one_vision(SIGLIP, init_std=0.02), "vision", others=(_in_one_vision(CLIP),)),
        "image_token_index": ReadField(151646, Values.integer(0), ("image_token",)),
        "video_token_index": ReadField(151647, Values.integer(0)),
        "vision_feature_select_strategy": ReadField("full", Values.one_of(*FEATURES)),
        "vision_feature_layer": ReadField(-1, CLIP_LLAVA.fields["vision_feature_layer"].values),
        "image_grid_pinpoints": ReadField(None, RESOLUTIONS.or_null),
        "vision_aspect_ratio": ReadField("anyres_max_9", Values(_is_anyres, "'anyres_max_' and a number of tiles")),
        "use_image_newline_parameter": UnusedField("the library always has the end of a line"),
        "image_seq_length": UnusedField("the library's model has no such field"),
    },
    aliases={"image_token_id": "image_token_index", "video_token_id": "video_token_index"},
    settings=_one_vision,
    write=_written_one_vision,
    preparation=TILES,
)
"""LLaVA-OneVision."""
FORMS = (CLIP_LLAVA, ONE_VISION)
