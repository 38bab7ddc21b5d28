"""The published form of DeepSeek-V2 and V3: latent attention, groups of experts, a layer for multi-token prediction."""

from typing import TYPE_CHECKING, Any

from mplug import (
    PublicConfig,
    PublicSettings,
    published_config,
    published_settings,
    training_choices,
)

if TYPE_CHECKING:
    from mplug_deepseek.config import DeepseekConfig

WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def settings_of(config: PublicConfig) -> PublicSettings:
    """The settings of a DeepSeek-V2 or V3."""
    third = config.expect("model_type", "deepseek_v3", "deepseek_v2") == "deepseek_v3"
    for name in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        config.expect(name, False)
    config.expect("hidden_act", "silu")
    config.expect("moe_layer_freq", 1)
    config.ignore("num_key_value_heads", "head_dim", "qk_head_dim", "num_nextn_predict_layers", "num_mtp_layers")
    config.ignore("ep_size", "pretraining_tp", "seq_aux", "aux_loss_alpha")
    shared = published_settings(config)
    for name in ("num_kv_heads", "head_dim"):  # latent attention has widths of its own
        del shared[name]
    fixed = {
        **shared,
        **{name: config.number(name) for name in WIDTHS},
        "q_lora_rank": config.take("q_lora_rank", None),
        "rope_interleaved": config.expect("rope_interleave", True, False),
        "moe_ffn_hidden_size": config.number("moe_intermediate_size"),
        "num_dense_layers": config.number("first_k_dense_replace", 0, least=0),
        "num_experts": config.number("n_routed_experts"),
        "num_experts_per_token": config.number("num_experts_per_tok"),
        "num_shared_experts": config.number("n_shared_experts", 0, least=0),
        "moe_router_scale": config.take("routed_scaling_factor", 1.0),
        **(_third(config) if third else _second(config)),
    }
    free = {**training_choices(config), "num_mtp_layers": 0, "mtp_loss_coefficient": 0.3}
    return PublicSettings(fixed, free, config.number("max_position_embeddings", 4096))


def _third(config: PublicConfig) -> dict[str, Any]:
    """Sigmoid scores; a bias of each expert for the choice."""
    config.expect("topk_method", "noaux_tc")
    return {
        "moe_router_score": config.expect("scoring_func", "sigmoid"),
        "moe_router_normalize": config.expect("norm_topk_prob", True, False),
        "moe_router_num_groups": config.number("n_group", 1),
        "moe_router_top_groups": config.number("topk_group", 1),
        "expert_bias": True,
    }


def _second(config: PublicConfig) -> dict[str, Any]:
    """Softmax scores; the score of a group is that of its best expert."""
    grouped = config.expect("topk_method", "greedy", "group_limited_greedy") != "greedy"
    groups, top = config.number("n_group", 1), config.number("topk_group", 1)
    return {
        "moe_router_score": config.expect("scoring_func", "softmax"),
        "moe_router_normalize": config.expect("norm_topk_prob", False),
        "moe_router_num_groups": groups if grouped else 1,
        "moe_router_top_groups": top if grouped else 1,
        "moe_router_group_best": 1,
    }


def config_of(config: "DeepseekConfig") -> dict[str, Any]:
    """The config.json of a model: V3 with sigmoid scores, else V2."""
    third = config.moe_router_score == "sigmoid"
    names = ("DeepseekV3ForCausalLM", "deepseek_v3") if third else ("DeepseekV2ForCausalLM", "deepseek_v2")
    found = published_config(config, *names)
    method = "noaux_tc" if third else "greedy" if config.moe_router_num_groups == 1 else "group_limited_greedy"
    return {
        **found,
        **{name: getattr(config, name) for name in (*WIDTHS, "q_lora_rank")},
        "head_dim": config.qk_rope_head_dim,
        "num_key_value_heads": config.num_attention_heads,
        "moe_intermediate_size": config.expert_width,
        "first_k_dense_replace": config.num_dense_layers,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_token,
        "n_shared_experts": config.num_shared_experts,
        "routed_scaling_factor": config.moe_router_scale,
        "norm_topk_prob": config.moe_router_normalize,
        "n_group": config.moe_router_num_groups,
        "topk_group": config.moe_router_top_groups,
        "topk_method": method,
        **(
            {"rope_interleave": config.rope_interleaved, "num_nextn_predict_layers": config.num_mtp_layers}
            if third
            else {}
        ),
    }
