"""The config.json of Gemma 2 and 3: of text alone, and of Gemma 3 with a tower. No torch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mplug_gemma.preparation import PREPARATION
from mplug_nn import (
    EXPERTS_ALTERING,
    EXPERTS_TRAINING,
    LAYER_TYPES_FIELDS,
    SHARED_FIELDS,
    FixedField,
    FormField,
    PublicField,
    PublicForm,
    ReadField,
    SumField,
    UnusedField,
    Values,
    activation_field,
    attention_types,
    decoder_fields,
    heads_fields,
    layer_types,
    read_rotary,
    rotary_fields,
    rotary_settings,
    tied_fields,
    written_heads,
    written_rotary,
)

if TYPE_CHECKING:
    from mplug_gemma.config import GemmaConfig
    from mplug_gemma.vision import VisionConfig

CAP = Values.positive().or_null
SIZES = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
SHARED: dict[str, PublicField] = {
    **heads_fields(4, 256, null=()),
    **tied_fields(True),
    **LAYER_TYPES_FIELDS,
    **activation_field("hidden_activation", "gelu_pytorch_tanh"),
    "hidden_act": FixedField("gelu_pytorch_tanh", ("gelu_pytorch_tanh",), "the library ignores it for Gemma"),
    "attention_bias": ReadField(False, Values.flag(), ("qkv_bias", "attention_out_bias")),
    "query_pre_attn_scalar": ReadField(256, Values.positive()),
    "sliding_window": ReadField(4096, Values.integer(), ("window",)),
    "use_bidirectional_attention": FixedField(None, (None, False)),
}
"""What Gemma 2 and 3 have."""


def _second(values: Mapping[str, Any]) -> dict[str, Any]:
    """Every second block has windows."""
    types = ["full" if number % 2 else "window" for number in range(values["num_hidden_layers"])]
    return {
        **rotary_settings(values),
        "window_rope_theta": None,
        "attention_scale": _scale(values),
        "attention_types": attention_types(values, types),
    }


def _third(values: Mapping[str, Any]) -> dict[str, Any]:
    """All blocks except every n-th have windows; they have rotary positions of their own."""
    pattern, saved = values["sliding_window_pattern"], values["_sliding_window_pattern"]
    if values["layer_types"] is None and saved not in (None, pattern):
        raise ValueError(
            f"its field '_sliding_window_pattern' is {saved}, which the library ignores; state 'layer_types', or "
            f"'sliding_window_pattern'"
        )
    types = ["window" if (number + 1) % pattern else "full" for number in range(values["num_hidden_layers"])]
    full, local = _rotary_of_types(values)
    if local["rope_scaling"] is not None:
        raise ValueError("it scales the rotary positions of blocks with windows, which the family does not support")
    return {
        **full,
        "window_rope_theta": local["rope_theta"],
        "attention_scale": _scale(values),
        "attention_types": attention_types(values, types),
    }


def _rotary_of_types(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rotary positions of blocks without windows, and of those with windows."""
    older, newer = values["rope_scaling"], values["rope_parameters"]
    if older is not None and newer is not None and newer.get("full_attention") != older:
        raise ValueError("its fields 'rope_parameters' and 'rope_scaling' contradict each other")
    if older and "rope_type" not in older:
        raise ValueError("its field 'rope_scaling' lacks 'rope_type', without which the library ignores it")
    types = {"full_attention": older or {}} if newer is None else newer
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise ValueError(f"its field 'rope_parameters.{name}' is unknown; it has the blocks' types of attention")
        if not isinstance(types[name], dict | None):
            raise ValueError(f"its field 'rope_parameters.{name}' is {types[name]!r}, but must be a mapping, or null")
    where = "rope_scaling" if newer is None else "rope_parameters.full_attention"
    full = types.get("full_attention") or {}
    if full.get("truncate", True) is not True:  # the library looks for it beside the types
        raise ValueError(f"its field '{where}.truncate' is {full['truncate']!r}, which the library ignores")
    local = types.get("sliding_attention") or {}
    return (
        read_rotary(where, full, values),
        read_rotary("rope_parameters.sliding_attention", local, values, "rope_local_base_freq"),
    )


def _scale(values: Mapping[str, Any]) -> float:
    scale: float = values["query_pre_attn_scalar"] ** -0.5
    return scale


def _written(config: "GemmaConfig") -> dict[str, Any]:
    scale = config.attention_scale or config.head_width**-0.5
    return {
        **written_heads(config),
        "query_pre_attn_scalar": round(scale**-2),
        "sliding_window": config.window or 4096,
        "layer_types": layer_types(config),
    }


def _written_second(config: "GemmaConfig") -> dict[str, Any]:
    return {**_written(config), **written_rotary(config.rope_theta, config.rope_scaling)}


def _written_third(config: "GemmaConfig") -> dict[str, Any]:
    base = config.window_rope_theta or config.rope_theta
    full = written_rotary(config.rope_theta, config.rope_scaling)
    local = written_rotary(base, None)
    types = {"full_attention": full["rope_parameters"], "sliding_attention": local["rope_parameters"]}
    return {**_written(config), **full, "rope_local_base_freq": base, "rope_parameters": types}


GEMMA2 = PublicForm(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    fields={
        **decoder_fields(**SIZES, vocab_size=256000, max_position_embeddings=8192),
        **SHARED,
        **rotary_fields(),
        "attn_logit_softcapping": ReadField(50.0, CAP, ("attention_soft_cap",)),
        "final_logit_softcapping": ReadField(30.0, CAP, ("logit_soft_cap",)),
        "sliding_window_size": SumField(None, ("sliding_window",)),  # of older releases
    },
    settings=_second,
    write=_written_second,
    implied={"qk_norm": False},
    training=EXPERTS_TRAINING,
    altering=EXPERTS_ALTERING,
    longest="max_position_embeddings",
)
GEMMA3 = PublicForm(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    fields={
        **decoder_fields(**SIZES, vocab_size=262208, max_position_embeddings=131072),
        **SHARED,
        **rotary_fields(1e6),
        "rope_local_base_freq": ReadField(1e4, Values.positive()),
        "attn_logit_softcapping": FixedField(None, (None,), "the library ignores other values for Gemma 3"),
        "final_logit_softcapping": ReadField(None, CAP, ("logit_soft_cap",)),
        "use_bidirectional_attention": FixedField(False, (None, False)),
        "sliding_window_pattern": ReadField(6, Values.integer()),
        "_sliding_window_pattern": ReadField(None, Values.integer().or_null),
    },
    settings=_third,
    write=_written_third,
    implied={"qk_norm": True},
    training=EXPERTS_TRAINING,
    altering=EXPERTS_ALTERING,
    longest="max_position_embeddings",
)


# Gemma 3 with a tower: fields beside, and in, two nested mappings.


TEXT, VISION = "text_config", "vision_config"
PLAIN = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}
"""The library's activation of an MLP without a gate -> vision.activation."""
SIZE, TOKEN = Values.integer(), Values.integer(0)


def _tower(values: Mapping[str, Any]) -> dict[str, Any]:
    if values["vision_use_head"]:
        raise ValueError(
            "its field 'vision_use_head' is true, or absent, but the family supports false only: the decoder reads no "
            "pooled vector of a whole picture"
        )
    return {}


def _written_tower(_: "VisionConfig") -> dict[str, Any]:
    return {"vision_use_head": False}


SIGLIP = PublicForm(
    architecture="",
    model_type="siglip_vision_model",
    fields={
        **SHARED_FIELDS,
        "hidden_size": ReadField(768, SIZE, ("hidden_size",)),
        "intermediate_size": ReadField(3072, SIZE, ("ffn_hidden_size",)),
        "num_hidden_layers": ReadField(12, Values.integer(most=10_000), ("num_layers",)),
        "num_attention_heads": ReadField(12, SIZE, ("num_attention_heads",)),
        "num_channels": ReadField(3, SIZE, ("channels",)),
        "image_size": ReadField(224, SIZE, ("image_size",)),
        "patch_size": ReadField(16, SIZE, ("patch_size",)),
        "hidden_act": ReadField("gelu_pytorch_tanh", Values.one_of(*PLAIN), ("activation",), PLAIN),
        "layer_norm_eps": ReadField(1e-6, Values.positive(), ("norm_eps",)),
        "attention_dropout": FixedField(0.0, (0.0,), "the tower has no dropout of attention weights"),
        "vision_use_head": ReadField(True, Values.flag()),
    },
    settings=_tower,
    write=_written_tower,
)
"""The tower."""
IDS = {
    "image_token_index": ("image_token", 262144),
    "boi_token_index": ("start_token", 255999),
    "eoi_token_index": ("end_token", 256000),
}
"""The field of a token's number -> our setting of the tower, and the library's default."""


def _whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of tokens, which are beside the tower's mapping."""
    tokens = {ours: values[name] for name, (ours, _) in IDS.items()}
    return {"vision": {**tokens, "tokens_per_image": values["mm_tokens_per_image"]}}


def _written_whole(config: "GemmaConfig") -> dict[str, Any]:
    vision = config.vision
    if vision is None:
        return {}
    return {
        **{name: getattr(vision, ours) for name, (ours, _) in IDS.items()},
        "mm_tokens_per_image": vision.tokens_per_image,
    }


SEEING = PublicForm(
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    fields={
        **SHARED_FIELDS,
        TEXT: FormField(
            replace(GEMMA3, architecture="", implied={"qk_norm": True, "logit_soft_cap": None}).with_fields(
                tie_word_embeddings=UnusedField("the field beside this mapping decides"),
                final_logit_softcapping=FixedField(None, (None,), "the library ignores other values beside a tower"),
            )
        ),
        VISION: FormField(SIGLIP, "vision"),
        **{name: ReadField(default, TOKEN) for name, (_, default) in IDS.items()},
        "mm_tokens_per_image": ReadField(256, SIZE),
        "initializer_range": UnusedField("it is of the projector's initial values, which the library sets to 0"),
        **tied_fields(True),
    },
    aliases={
        "image_token_id": "image_token_index",
        "boi_token_id": "boi_token_index",
        "eoi_token_id": "eoi_token_index",
    },
    settings=_whole,
    write=_written_whole,
    preparation={"preprocessor_config.json": PREPARATION},
)
FORMS = (GEMMA3, GEMMA2, SEEING)
