"""The config.json of LLaVA-1.5: two nested mappings, of which that of the decoder is another family's. No torch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mplug_nn import (
    SHARED_FIELDS,
    FixedField,
    FormField,
    FoundFamily,
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
FEATURES = {"default": "patches", "full": "all"}
"""The library's choice of rows of a picture -> vision.features."""
CLIP = PublicForm(
    architecture="",
    model_type="clip_vision_model",
    fields={
        **SHARED_FIELDS,
        "model_type": FixedField("clip_vision_model", ("clip_vision_model",)),
        "hidden_size": ReadField(1024, SIZE, ("hidden_size",)),
        "intermediate_size": ReadField(4096, SIZE, ("ffn_hidden_size",)),
        "num_hidden_layers": ReadField(24, Values.integer(most=10_000), ("num_layers",)),
        "num_attention_heads": ReadField(16, SIZE, ("num_attention_heads",)),
        "num_channels": ReadField(3, Values.one_of(3), ("channels",)),
        "image_size": ReadField(336, SIZE, ("image_size",)),
        "patch_size": ReadField(14, SIZE, ("patch_size",)),
        "hidden_act": ReadField("quick_gelu", Values.one_of(*PLAIN), ("activation",), PLAIN),
        "layer_norm_eps": ReadField(1e-5, Values.positive(), ("norm_eps",)),
        "initializer_range": ReadField(0.02, Values.not_negative(), ("init_std",)),
        "attention_dropout": FixedField(0.0, (0.0,), "the family has no dropout of attention weights"),
        "dropout": UnusedField("the library's tower has no such dropout"),
        "initializer_factor": UnusedField("a factor of the library's initial weights"),
        "projection_dim": UnusedField("the width of CLIP's own projection, which LLaVA does not use"),
        "vocab_size": UnusedField("a size of CLIP's tower of text"),
    },
    implied={"class_row": True, "patch_bias": False, "norm_before": True},
)
"""The tower of CLIP; the defaults are those of the library's mapping in a LLaVA."""


def _whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """What belongs to the tower beside its mapping; the decoder must embed tokens as the library does."""
    decoder: FoundFamily = values[TEXT]
    _refuse_other_embedding(decoder.config, decoder.name)
    if values["tie_word_embeddings"] and not decoder.config.embedding_config().tied:
        raise ValueError(
            f"its field 'tie_word_embeddings' is true and that of '{TEXT}' is not; the family supports equal values"
        )
    tower = values[VISION]
    rows = (tower["image_size"] // tower["patch_size"]) ** 2 + (values["vision_feature_select_strategy"] == "full")
    if values["image_seq_length"] not in (None, rows):
        raise ValueError(
            f"its field 'image_seq_length' is {values['image_seq_length']}, but the family supports {rows} only, which "
            f"is the number of rows of a picture"
        )
    return {
        "vision": {
            "feature_layer": values["vision_feature_layer"],
            "features": FEATURES[values["vision_feature_select_strategy"]],
        }
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
        "vision_feature_select_strategy": theirs[vision.features],
        "image_seq_length": len(vision.seen_rows),
        "tie_word_embeddings": config.decoder.config.embedding_config().tied,
    }


CLIP_LLAVA = PublicForm(
    architecture="LlavaForConditionalGeneration",
    model_type="llava",
    fields={
        **SHARED_FIELDS,
        TEXT: family_field("decoder", "llama"),
        VISION: FormField(CLIP, "vision"),
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
FORMS = (CLIP_LLAVA,)
