"""The config.json of Qwen2, Qwen3 and Qwen3-MoE."""

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
    from mplug_qwen.config import QwenConfig


def settings_of(config: PublicConfig) -> PublicSettings:
    """The settings of a Qwen."""
    kind = config.expect("model_type", "qwen3", "qwen2", "qwen3_moe")
    config.expect("hidden_act", "silu")
    shared = published_settings(config)
    bias = kind == "qwen2" or config.expect("attention_bias", False, True)
    fixed = {
        **shared,
        "tie_embeddings": config.expect("tie_word_embeddings", False, True),
        "qk_norm": kind != "qwen2",
        "qkv_bias": bias,
        "attention_out_bias": bias and kind != "qwen2",
        **_windows(config, shared["num_layers"]),
        **(_experts(config, shared["num_layers"]) if kind == "qwen3_moe" else {}),
    }
    return PublicSettings(fixed, training_choices(config), config.number("max_position_embeddings", 32768))


def _windows(config: PublicConfig, num_layers: int) -> dict[str, Any]:
    """With windows, blocks from `max_window_layers` on have them."""
    has_windows = config.expect("use_sliding_window", False, True)
    window, first = config.take("sliding_window", None), config.number("max_window_layers", num_layers, least=0)
    types = ["window" if has_windows and number >= first else "full" for number in range(num_layers)]
    types = attention_types(config, num_layers, types)
    return {"attention_types": types, "window": window if "window" in types else None}


def _experts(config: PublicConfig, num_layers: int) -> dict[str, Any]:
    """Blocks have experts from the first to the last, or in every n-th block, or in all but some."""
    step, dense = config.number("decoder_sparse_step", 1), config.take("mlp_only_layers", [])
    types = ["mlp" if number in dense or (number + 1) % step else "experts" for number in range(num_layers)]
    chosen, normalize = config.number("num_experts_per_tok", 8), config.expect("norm_topk_prob", False, True)
    if normalize and chosen == 1:
        raise ValueError("it normalises the gates of a single expert, which the family does not support")
    number = config.take("num_experts", None)
    return {
        "num_experts": config.number("num_local_experts", number) if number is None else number,
        "num_experts_per_token": chosen,
        "moe_ffn_hidden_size": config.number("moe_intermediate_size"),
        "moe_router_normalize": normalize,
        "feed_forward_types": None if set(types) == {"experts"} else types,
    }


def config_of(config: "QwenConfig") -> dict[str, Any]:
    """The config.json of a model: Qwen2 without a norm of queries and keys, else Qwen3."""
    kinds = [config.has_experts(number) for number in range(config.num_layers)]
    if not config.qk_norm:
        name, kind = "Qwen2ForCausalLM", "qwen2"
    else:
        name, kind = ("Qwen3MoeForCausalLM", "qwen3_moe") if any(kinds) else ("Qwen3ForCausalLM", "qwen3")
    found = published_config(config, name, kind)
    if kind == "qwen2":
        del found["head_dim"], found["attention_bias"]
    if config.window is not None:
        found |= {"use_sliding_window": True, "sliding_window": config.window, "layer_types": layer_types(config)}
    if kind == "qwen3_moe":
        found |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_token,
            "moe_intermediate_size": config.expert_width,
            "norm_topk_prob": config.moe_router_normalize,
            "mlp_only_layers": [number for number, has_experts in enumerate(kinds) if not has_experts],
            "router_aux_loss_coef": config.aux_loss_coefficient,
        }
    return found
