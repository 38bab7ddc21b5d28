"""The config.json of Granite 3 (dense) and of Granite 4 (hybrids, with or without experts)."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mplug_nn import (
    EXPERTS_ALTERING,
    EXPERTS_TRAINING,
    LAYER_TYPES_FIELDS,
    ROUTER_LOSS_FIELDS,
    FixedField,
    PublicField,
    PublicForm,
    ReadField,
    Values,
    block_types,
    decoder_fields,
    heads_fields,
    mixer_layer_types,
    rotary_fields,
    rotary_settings,
    tied_fields,
    unused,
    written_heads,
    written_rotary,
)

if TYPE_CHECKING:
    from mplug_granite.config import GraniteConfig

MIXERS = {
    "linear_attention": "mamba2",
    "full_attention": "attention",
    "mamba": "mamba2",  # the names of older releases
    "attention": "attention",
}
"""Entry of `layer_types` -> entry of `mixer_types`."""
ALWAYS = (0.0, math.inf)
"""Limits of time steps that change none."""
SHARED: dict[str, PublicField] = {
    **decoder_fields(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=2048,
    ),
    **rotary_fields(),
    **tied_fields(False),
    **heads_fields(None, None, null=("num_key_value_heads",)),
    "attention_bias": ReadField(False, Values.flag(), ("qkv_bias", "attention_out_bias")),
    "embedding_multiplier": ReadField(1.0, Values.positive(), ("embedding_multiplier",)),
    "residual_multiplier": ReadField(1.0, Values.positive(), ("residual_multiplier",)),
    "attention_multiplier": ReadField(1.0, Values.positive(), ("attention_scale",)),
    "logits_scaling": ReadField(1.0, Values.positive(), ("logits_divisor",)),
    **unused("how the weights were drawn", "init_method"),
    "normalization_function": FixedField("rmsnorm", ("rmsnorm",)),
}
"""What both have."""


def _is_width(value: Any) -> bool:
    return value == "auto" or (type(value) is int and value > 0)


def _hybrid(values: Mapping[str, Any]) -> dict[str, Any]:
    """Mixers, positions in all blocks with attention or in none, and experts beside a shared MLP or this MLP alone."""
    mixers = block_types(values, MIXERS, ["linear_attention"] * values["num_hidden_layers"])
    feed_forward, positions = _feed_forward(values), values["position_embedding_type"]
    heads, inner = values["mamba_n_heads"], values["mamba_expand"] * values["hidden_size"]
    width = values["mamba_d_head"] if values["mamba_d_head"] != "auto" else inner // heads
    if heads * width != inner:
        raise ValueError(
            f"its field 'mamba_n_heads' is {heads}, but 'mamba_expand' needs heads of {width} that fill {inner}"
        )
    return {
        **rotary_settings(values),
        **feed_forward,
        "position_types": ("rotary" if positions == "rope" else "none",),
        "mixer_types": mixers,
        "published_as": "granitemoehybrid",
        "linear_num_value_heads": heads,
        "linear_value_head_dim": width,
    }


def _feed_forward(values: Mapping[str, Any]) -> dict[str, Any]:
    shared, width = values["shared_intermediate_size"], values["intermediate_size"]
    if not values["num_local_experts"]:
        return {"ffn_hidden_size": shared}
    return {"num_shared_experts": 1, "moe_ffn_hidden_size": width, "moe_shared_ffn_hidden_size": shared}


def _written_dense(config: "GraniteConfig") -> dict[str, Any]:
    if config.is_published_hybrid:
        raise ValueError("model.published_as is 'granitemoehybrid', or model.mixer_types or model.num_experts say so")
    return _written(config)


def _written(config: "GraniteConfig") -> dict[str, Any]:
    return {
        **written_heads(config),
        **written_rotary(config.rope_theta, config.rope_scaling),
        "attention_multiplier": config.attention_scale or config.head_width**-0.5,
    }


def _written_hybrid(config: "GraniteConfig") -> dict[str, Any]:
    if not config.is_published_hybrid:
        raise ValueError("model.published_as is 'granite', or model.mixer_types and model.num_experts say so")
    types = mixer_layer_types(config, MIXERS)
    kinds = [MIXERS[one] for one in types]
    width, has_experts = config.expert_width, config.num_experts > 0
    positions = {config.entry("position_types", n) for n, kind in enumerate(kinds) if kind == "attention"}
    if len(positions) > 1:
        raise ValueError(f"no 'position_embedding_type' means model.position_types={config.position_types!r}")
    return {
        **_written(config),
        **_written_mamba(config, has_mamba="mamba2" in kinds),
        "layer_types": types,
        "position_embedding_type": "rope" if "rotary" in positions else None,
        "intermediate_size": width if has_experts else config.ffn_hidden_size,
        "shared_intermediate_size": (config.shared_width or width) if has_experts else config.ffn_hidden_size,
    }


def _written_mamba(config: "GraniteConfig", *, has_mamba: bool) -> dict[str, Any]:
    """The sizes of Mamba-2, whose heads fill a multiple of the model's width."""
    if not has_mamba:
        return {"mamba_n_heads": 1, "mamba_d_head": "auto", "mamba_expand": 1, "mamba_n_groups": 1, "mamba_d_state": 1}
    heads, state = config.linear_value_heads, config.linear_key_head_dim or config.head_width
    width = config.linear_value_head_dim or state
    if heads * width % config.hidden_size:
        raise ValueError(
            f"'mamba_expand' is an integer, and model.linear_num_value_heads={heads} of "
            f"model.linear_value_head_dim={width} fill no multiple of {config.hidden_size}"
        )
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": width,
        "mamba_expand": heads * width // config.hidden_size,
        "mamba_n_groups": config.linear_key_heads,
        "mamba_d_state": state,
    }


GRANITE = PublicForm(
    architecture="GraniteForCausalLM",
    model_type="granite",
    fields={**SHARED, "mlp_bias": ReadField(False, Values.flag(), ("mlp_bias",))},
    settings=rotary_settings,
    implied={"published_as": "granite"},
    write=_written_dense,
    training=EXPERTS_TRAINING,
    altering=EXPERTS_ALTERING,
    longest="max_position_embeddings",
)
"""Granite 3."""
HYBRID = PublicForm(
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    fields={
        **SHARED,
        **LAYER_TYPES_FIELDS,
        **ROUTER_LOSS_FIELDS,
        "hidden_act": FixedField("silu", ("silu",), "it is also the activation of the short convolutions"),
        "num_local_experts": ReadField(8, Values.integer(0), ("num_experts",)),
        "num_experts_per_tok": ReadField(2, Values.integer(), ("num_experts_per_token",)),
        "shared_intermediate_size": ReadField(1024, Values.integer()),
        "position_embedding_type": ReadField(None, Values.one_of("rope", "nope", None)),
        "mamba_n_heads": ReadField(128, Values.integer()),
        "mamba_n_groups": ReadField(1, Values.integer(), ("linear_num_key_heads",)),
        "mamba_d_state": ReadField(256, Values.integer(), ("linear_key_head_dim",)),
        "mamba_d_head": ReadField("auto", Values(_is_width, 'an integer of at least 1, or "auto"', ("auto",))),
        "mamba_d_conv": ReadField(4, Values.integer(2), ("linear_conv_width",)),
        "mamba_expand": ReadField(2, Values.integer()),
        "mamba_conv_bias": FixedField(True, (True,)),
        "mamba_proj_bias": FixedField(False, (False,)),
        "time_step_limit": FixedField(ALWAYS, (ALWAYS, list(ALWAYS), [0.0, {"__float__": "Infinity"}])),
        **unused("scans have chunks of their own", "mamba_chunk_size"),
    },
    aliases={"layers_block_type": "layer_types"},
    settings=_hybrid,
    write=_written_hybrid,
    implied={"activation": "swiglu"},
    training=EXPERTS_TRAINING,
    altering=EXPERTS_ALTERING,
    longest="max_position_embeddings",
)
"""Granite 4."""
FORMS = (GRANITE, HYBRID)
