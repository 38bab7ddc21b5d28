"""The config.json of LLaVA-1.5: two nested mappings, of which that of the decoder is another family's. No torch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mplug_llava.published_towers import CLIP, PLAIN, SIGLIP
from mplug_nn import SHARED_FIELDS, FormField, FoundFamily, PublicForm, ReadField, UnusedField, Values, family_field

if TYPE_CHECKING:
    from mplug_llava.config import LlavaConfig

TEXT, VISION = "text_config", "vision_config"
SIZE = Values.integer()
FEATURES = {"default": "patches", "full": "all"}
"""The library's choice of rows of a picture, which begins with a class row -> vision.features."""


def _whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """What belongs to the tower beside its mapping; the decoder must embed tokens as the library does."""
    decoder: FoundFamily = values[TEXT]
    _refuse_other_embedding(decoder.config, decoder.name)
    if values["tie_word_embeddings"] and not decoder.config.embedding_config().tied:
        raise ValueError(
            f"its field 'tie_word_embeddings' is true and that of '{TEXT}' is not; the family supports equal values"
        )
    tower, strategy = values[VISION], values["vision_feature_select_strategy"]
    has_class_row = getattr(tower, "form", CLIP) is CLIP
    if not has_class_row and strategy == "default":
        raise ValueError(
            f"its field 'vision_feature_select_strategy' is 'default', which drops the first patch of a '{VISION}' "
            f'without a class row; the family supports "full" only'
        )
    rows = (tower["image_size"] // tower["patch_size"]) ** 2 + (has_class_row and strategy == "full")
    if values["image_seq_length"] not in (None, rows):
        raise ValueError(
            f"its field 'image_seq_length' is {values['image_seq_length']}, but the family supports {rows} only, which "
            f"is the number of rows of a picture"
        )
    return {
        "vision": {
            "feature_layer": values["vision_feature_layer"],
            "features": FEATURES[strategy] if has_class_row else "patches",
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
FORMS = (CLIP_LLAVA,)
