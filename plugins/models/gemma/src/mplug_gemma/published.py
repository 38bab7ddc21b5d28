"""The config.json of Gemma 2 and 3 (text alone)."""

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
    from mplug_gemma.config import GemmaConfig

GELU = "gelu_pytorch_tanh"


def settings_of(config: PublicConfig) -> PublicSettings:
    """The settings of a Gemma."""
    is_third = config.expect("model_type", "gemma2", "gemma3_text") == "gemma3_text"
    config.expect("hidden_activation", GELU)
    config.expect("hidden_act", GELU)
    config.expect("attention_bias", False)
    config.expect("use_bidirectional_attention", False)
    caps = (None, None) if is_third else (50.0, 30.0)
    rope, local = _third_rotary(config) if is_third else (config.rope(), None)
    shared = published_settings(config, rope=rope)
    pattern = config.number("sliding_window_pattern", config.number("_sliding_window_pattern", 6)) if is_third else 2
    types = ["window" if (number + 1) % pattern else "full" for number in range(shared["num_layers"])]
    fixed = {
        **shared,
        "window_rope_theta": local,
        "head_dim": config.take("head_dim", 256),
        "tie_embeddings": config.expect("tie_word_embeddings", True, False),
        "qk_norm": is_third,
        "attention_scale": config.take("query_pre_attn_scalar", 256) ** -0.5,
        "attention_soft_cap": config.get("attn_logit_softcapping", caps[0]),
        "logit_soft_cap": config.get("final_logit_softcapping", caps[1]),
        "window": config.number("sliding_window", 4096),
        "attention_types": attention_types(config, shared["num_layers"], types),
    }
    return PublicSettings(fixed, training_choices(config), config.number("max_position_embeddings", 8192))


def _third_rotary(config: PublicConfig) -> tuple[dict[str, Any], float]:
    """The rotary positions of blocks without windows, and the base of those with windows, which have no scaling."""
    found = config.take("rope_parameters", {})
    if "full_attention" not in found:
        return config.rope(1e6), config.take("rope_local_base_freq", 1e4)
    full, local = found["full_attention"], found.get("sliding_attention", {})
    if local.get("rope_type", "default") != "default":
        raise ValueError("it scales the rotary positions of blocks with windows, which the family does not support")
    return {"rope_theta": 1e6, **full}, local.get("rope_theta", 1e4)


def config_of(config: "GemmaConfig") -> dict[str, Any]:
    """The config.json of a model: Gemma 3 with a norm of queries and keys, else Gemma 2."""
    third = config.qk_norm
    names = ("Gemma3ForCausalLM", "gemma3_text") if third else ("Gemma2ForCausalLM", "gemma2")
    found = published_config(config, *names)
    scale = config.attention_scale or config.head_width**-0.5
    del found["hidden_act"]
    found |= {
        "hidden_activation": GELU,
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
        "sliding_window": config.window or 4096,
        "layer_types": layer_types(config),
    }
    if third:
        local = {"rope_type": "default", "rope_theta": config.window_rope_theta or config.rope_theta}
        found["rope_parameters"] = {"full_attention": found["rope_parameters"], "sliding_attention": local}
    return found
