"""The config.json of towers of CLIP and SigLIP: as a mapping of LLaVA's, and of folders of their own. No torch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mplug_nn import SHARED_FIELDS, FixedField, FormField, PublicField, PublicForm, ReadField, UnusedField, Values

PLAIN = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "quick_gelu": "quick_gelu"}
"""The library's activation -> ours."""
SIZE = Values.integer()
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


def _agrees(form: PublicForm) -> Any:
    """A check of `vision_config_dict`, which the library prefers to `vision_config` if both are there."""

    def check(values: Mapping[str, Any]) -> dict[str, Any]:
        given = values["vision_config_dict"]
        if given is not None and form.read(given).fixed != form.settings_of(values["vision_config"]).fixed:
            raise ValueError(
                "its field 'vision_config_dict' describes another tower than 'vision_config'; the family supports "
                "equal ones"
            )
        return {}

    return check


def _whole(form: PublicForm, architecture: str, model_type: str) -> PublicForm:
    """The model of which a tower is a part; the other part is one of text."""
    text = UnusedField("the family uses the tower that sees alone")
    names = ("text_config", "text_config_dict", "projection_dim", "logit_scale_init_value", "initializer_factor")
    mapping = Values(lambda value: value is None or isinstance(value, dict), "a mapping, or null")
    return PublicForm(
        architecture=architecture,
        model_type=model_type,
        fields={
            **SHARED_FIELDS,
            **dict.fromkeys(names, text),
            "vision_config": FormField(form),
            "vision_config_dict": ReadField(None, mapping),
        },
        settings=_agrees(form),
    )


_BASE = _tower_fields(768, 3072, 12, 12, side=224, patch=32, activation="quick_gelu", eps=1e-5)
CLIP_ALONE = replace(CLIP.with_fields(**_BASE), architecture="CLIPVisionModel")
"""A folder of CLIP's tower; the defaults are those of the library's class."""
SIGLIP_ALONE = replace(SIGLIP, architecture="SiglipVisionModel")
"""A folder of SigLIP's tower."""
PARTS = {
    "vision": (
        CLIP_ALONE,
        SIGLIP_ALONE,
        _whole(CLIP_ALONE, "CLIPModel", "clip"),
        _whole(SIGLIP_ALONE, "SiglipModel", "siglip"),
    )
}
"""The parts of the family that have folders of their own, beside the decoder."""
