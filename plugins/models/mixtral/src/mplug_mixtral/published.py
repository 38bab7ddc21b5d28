"""Mixtral's published form: its config.json and the names of its tensors (arXiv 2401.04088)."""

from typing import TYPE_CHECKING, Any

from mplug import PublicConfig, PublicSettings

if TYPE_CHECKING:
    from mplug_mixtral.config import MixtralConfig


def settings_of(config: PublicConfig) -> PublicSettings:
    """The settings of a Mixtral."""
    config.expect("hidden_act", "silu")
    config.expect("tie_word_embeddings", False)
    config.expect("sliding_window", None)
    config.expect("attention_dropout", 0.0, 0)
    longest = config.number("max_position_embeddings", 32768)
    rope = config.rope(1e6)
    if rope["rope_type"] != "default":
        raise ValueError(f"it scales its rotary positions ('{rope['rope_type']}'), which the family does not support")
    heads = config.number("num_attention_heads")
    fixed = {
        "hidden_size": config.number("hidden_size"),
        "num_layers": config.number("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_kv_heads": config.number("num_key_value_heads", heads),
        "head_dim": config.take("head_dim", None),
        "vocab_size": config.number("vocab_size"),
        "ffn_hidden_size": config.number("intermediate_size"),
        "num_experts": config.number("num_local_experts", 8),
        "num_experts_per_token": config.number("num_experts_per_tok", 2),
        "moe_router_normalize": True,
        "rope_theta": rope["rope_theta"],
        "norm_eps": config.take("rms_norm_eps", 1e-5),
    }
    free = {
        "aux_loss_coefficient": config.take("router_aux_loss_coef", 0.001),
        "z_loss_coefficient": 0.0,
        "moe_balance": "sequence",
        "moe_router_jitter": config.take("router_jitter_noise", 0.0),
        "capacity_factor": None,
        "capacity_dropping": "probability",
        "init_std": config.take("initializer_range", 0.02),
    }
    return PublicSettings(fixed, free, longest)


def config_of(config: "MixtralConfig") -> dict[str, Any]:
    """The config.json of a model."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "vocab_size": config.vocab_size,
        "intermediate_size": config.expert_width,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_token,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "router_aux_loss_coef": config.aux_loss_coefficient,
        "router_jitter_noise": config.moe_router_jitter,
        "initializer_range": config.init_std,
        "tie_word_embeddings": False,
    }
