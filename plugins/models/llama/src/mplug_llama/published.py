"""The config.json of Llama."""

from typing import TYPE_CHECKING, Any

from mplug import PublicConfig, PublicSettings, published_config, published_settings, training_choices

if TYPE_CHECKING:
    from mplug_llama.config import LlamaConfig


def settings_of(config: PublicConfig) -> PublicSettings:
    """The settings of a Llama."""
    config.expect("hidden_act", "silu")
    config.ignore("pretraining_tp")
    bias = config.expect("attention_bias", False, True)
    fixed = {
        **published_settings(config),
        "tie_embeddings": config.expect("tie_word_embeddings", False, True),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": config.expect("mlp_bias", False, True),
    }
    return PublicSettings(fixed, training_choices(config), config.number("max_position_embeddings", 2048))


def config_of(config: "LlamaConfig") -> dict[str, Any]:
    """The config.json of a model."""
    return {**published_config(config, "LlamaForCausalLM", "llama"), "mlp_bias": config.mlp_bias}
