"""The config.json of LLaVA: two nested mappings, of which that of the decoder is another family's. No torch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mplug_llava.preparation import PREPARATION
from mplug_llava.tiling import TilingConfig
from mplug_nn import (
    SHARED_FIELDS,
    FixedField,
    FormField,
    FoundFamily,
    PublicField,
    PublicForm,
    ReadField,
    UnusedField,
    Values,
    family_field,
)

if TYPE_CHECKING:
    from mplug_llava.config import LlavaConfig

TEXT, VISION = "text_config", "vision_config"
PLAIN = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "quick_gelu": "quick_gelu"}
"""The library's activation -> ours."""
SIZE = Values.integer()
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
"""Fields of a tower's mapping."""
FEATURES = {"default": "patches", "full": "all"}
"""The library's choice of rows of a picture, which begins with a class row -> vision.features."""
CLIP_PREPARATION = {
    "fit": "crop",
    "pixel_mean": (0.48145466, 0.4578275, 0.40821073),
    "pixel_std": (0.26862954, 0.26130258, 0.27577711),
}
SIGLIP_PREPARATION = {"fit": "stretch", "pixel_mean": (0.5, 0.5, 0.5), "pixel_std": (0.5, 0.5, 0.5)}
"""How pictures are prepared, which the folder's preprocessor_config.json may state otherwise."""


def _tower_fields(
    width: int, ffn: int, layers: int, heads: int, *, side: int, patch: int, activation: str, eps: float
) -> dict[str, PublicField]:
    """Rows that CLIP and SigLIP share, with the library's defaults."""
    return {
        **SHARED_FIELDS,
        "hidden_size": ReadField(width, SIZE, ("hidden_size",)),
        "intermediate_size": ReadField(ffn, SIZE, ("ffn_hidden_size",)),
        "num_hidden_layers": ReadField(layers, Values.integer(most=10_000), ("num_layers",)),
        "num_attention_heads": ReadField(heads, SIZE, ("num_attention_heads",)),
        "num_channels": ReadField(3, Values.one_of(3), ("channels",)),
        "image_size": ReadField(side, SIZE, ("image_size",)),
        "patch_size": ReadField(patch, SIZE, ("patch_size",)),
        "hidden_act": ReadField(activation, Values.one_of(*PLAIN), ("activation",), PLAIN),
        "layer_norm_eps": ReadField(eps, Values.positive(), ("norm_eps",)),
        "attention_dropout": FixedField(0.0, (0.0,), "the family has no dropout of attention weights"),
    }


CLIP = PublicForm(
    architecture="",
    model_type="clip_vision_model",
    fields={
        **_tower_fields(1024, 4096, 24, 16, side=336, patch=14, activation="quick_gelu", eps=1e-5),
        "initializer_range": ReadField(0.02, Values.not_negative(), ("init_std",)),
        "dropout": UnusedField("the library's tower has no such dropout"),
        "initializer_factor": UnusedField("a factor of the library's initial weights"),
        "projection_dim": UnusedField("the width of CLIP's own projection, which LLaVA does not use"),
        "vocab_size": UnusedField("a size of CLIP's tower of text"),
    },
    implied={"class_row": True, "patch_bias": False, "norm_before": True, "pooling_head": False},
    training=CLIP_PREPARATION,
)
"""The tower of CLIP; the defaults are those of the library's mapping in a LLaVA."""
SIGLIP = PublicForm(
    architecture="",
    model_type="siglip_vision_model",
    fields={
        **_tower_fields(768, 3072, 12, 12, side=224, patch=16, activation="gelu_pytorch_tanh", eps=1e-6),
        "vision_use_head": ReadField(True, Values.flag(), ("pooling_head",)),
        "initializer_range": UnusedField("the library's initial weights of this tower do not depend on it"),
        "initializer_factor": UnusedField("a factor of the library's initial weights"),
    },
    implied={"class_row": False, "patch_bias": True, "norm_before": False},
    training={**SIGLIP_PREPARATION, "init_std": 0.02},
)
"""The tower of SigLIP."""


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
    preparation=PREPARATION,
)
"""LLaVA-OneVision."""
FORMS = (CLIP_LLAVA, ONE_VISION)
