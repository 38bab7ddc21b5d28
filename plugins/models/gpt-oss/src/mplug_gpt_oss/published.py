"""The published form of gpt-oss: transposed experts with interleaved gate and up projections."""

from typing import TYPE_CHECKING, Any

from mplug import (
    PublicConfig,
    PublicSettings,
    attention_types,
    layer_types,
    published_config,
    published_settings,
    training_choices,
)

if TYPE_CHECKING:
    from mplug_gpt_oss.config import GptOssConfig

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What the library takes if a config.json does not state it."""


def settings_of(config: PublicConfig) -> PublicSettings:
    """The settings of a gpt-oss."""
    config.expect("hidden_act", "silu")
    config.expect("tie_word_embeddings", False)
    config.expect("swiglu_limit", 7.0)
    config.expect("swiglu_alpha", 1.702)
    config.ignore("initial_context_length")
    rope = config.rope(150000.0)
    shared = published_settings(config, rope=rope if rope["rope_type"] != "default" else {**rope, **YARN})
    bias, layers = config.expect("attention_bias", True, False), shared["num_layers"]
    types = ["full" if number % 2 else "window" for number in range(layers)]
    chosen = config.take("experts_per_token", None)
    fixed = {
        **shared,
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "window": config.number("sliding_window", 128),
        "attention_types": attention_types(config, layers, types),
        "num_experts": config.number("num_local_experts", 128),
        "num_experts_per_token": config.number("num_experts_per_tok", 4 if chosen is None else chosen),
    }
    return PublicSettings(fixed, training_choices(config), config.number("max_position_embeddings", 131072))


def config_of(config: "GptOssConfig") -> dict[str, Any]:
    """The config.json of a model."""
    return {
        **published_config(config, "GptOssForCausalLM", "gpt_oss"),
        "sliding_window": config.window,
        "layer_types": layer_types(config),
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_token,
        "swiglu_limit": 7.0,
        "router_aux_loss_coef": config.aux_loss_coefficient,
    }
