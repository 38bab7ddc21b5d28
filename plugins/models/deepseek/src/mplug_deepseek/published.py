"""The config.json of DeepSeek-V2 and V3: latent attention, groups of experts, a layer for multi-token prediction."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mplug_nn import (
    EXPERTS_ALTERING,
    EXPERTS_TRAINING,
    ROUTER_LOSS_FIELDS,
    SLICES_FIELDS,
    UNTIED_FIELDS,
    FixedField,
    PublicField,
    PublicForm,
    ReadField,
    SumField,
    Values,
    decoder_fields,
    rotary_fields,
    rotary_settings,
    unused,
    written_rotary,
)

if TYPE_CHECKING:
    from mplug_deepseek.config import DeepseekConfig

LATENT: dict[str, PublicField] = {
    "q_lora_rank": ReadField(1536, Values.integer().or_null, ("q_lora_rank",)),
    "kv_lora_rank": ReadField(512, Values.integer(), ("kv_lora_rank",)),
    "qk_nope_head_dim": ReadField(128, Values.integer(), ("qk_nope_head_dim",)),
    "qk_rope_head_dim": ReadField(64, Values.integer(), ("qk_rope_head_dim",)),
    "v_head_dim": ReadField(128, Values.integer(), ("v_head_dim",)),
    "qk_head_dim": SumField(None, ("qk_nope_head_dim", "qk_rope_head_dim")),
    "attention_bias": FixedField(False, (False,)),
    "mlp_bias": FixedField(False, (False,)),
}
"""Latent attention. It has as many keys as queries, and widths of its own."""
EXPERTS: dict[str, PublicField] = {
    **ROUTER_LOSS_FIELDS,
    "router_aux_loss_coef": ReadField(0.0, Values.not_negative(), ("aux_loss_coefficient",), training=True),
    "num_experts_per_tok": ReadField(8, Values.integer(), ("num_experts_per_token",)),
    "moe_layer_freq": FixedField(1, (1,)),
    **unused("the balancing loss of older releases", "seq_aux aux_loss_alpha"),
    **unused("the number of ranks of older releases", "ep_size"),
}
GROUPED = "group_limited_greedy"
TRUTH = {True: True, False: False, None: False}
"""A flag of the library that may be null, which means false."""


def _experts(routed: int, shared: int, width: int, first: int, scale: float) -> dict[str, PublicField]:
    """Rows of experts, with the library's defaults."""
    return {
        "n_routed_experts": ReadField(routed, Values.integer(), ("num_experts",)),
        "n_shared_experts": ReadField(shared, Values.integer(), ("num_shared_experts",)),
        "moe_intermediate_size": ReadField(width, Values.integer(), ("moe_ffn_hidden_size",)),
        "first_k_dense_replace": ReadField(first, Values.integer(0), ("num_dense_layers",)),
        "routed_scaling_factor": ReadField(scale, Values.positive(), ("moe_router_scale",)),
    }


def _common(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions; the scale of attention needs YaRN's factor. No experts if all blocks are dense."""
    for name in ("rope_scaling", "rope_parameters"):
        given = values[name] or {}
        if given.get("mscale_all_dim") and given.get("factor", 1) is None:
            raise ValueError(f"its field '{name}.factor' is null, but 'mscale_all_dim' needs it")
    dense = values["first_k_dense_replace"] >= values["num_hidden_layers"]
    return {**rotary_settings(values), **({"num_experts": 0, "num_dense_layers": 0} if dense else {})}


def _second(values: Mapping[str, Any]) -> dict[str, Any]:
    """The score of a group is that of its best expert; the method 'greedy' has no groups."""
    if values["topk_method"] != GROUPED:
        return {**_common(values), "moe_router_num_groups": 1, "moe_router_top_groups": 1}
    groups, top = values["n_group"], values["topk_group"]
    if groups is None or top is None:
        raise ValueError(f"its field 'topk_method' is \"{GROUPED}\", which needs 'n_group' and 'topk_group'")
    return {**_common(values), "moe_router_num_groups": groups, "moe_router_top_groups": top}


def _third(values: Mapping[str, Any]) -> dict[str, Any]:
    """The score of a group is the sum of its two best experts."""
    experts, groups = values["n_routed_experts"], values["n_group"]
    if experts < 2 * groups:
        raise ValueError(
            f"its field 'n_group' ({groups}) leaves a group of its {experts} experts fewer than 2, and the score of a "
            f"group is that of its 2 best experts"
        )
    return _common(values)


def _written(config: "DeepseekConfig") -> dict[str, Any]:
    return {
        **written_rotary(config.rope_theta, config.rope_scaling),
        "moe_intermediate_size": config.expert_width,
        "head_dim": config.qk_rope_head_dim,
        "num_key_value_heads": config.num_attention_heads,
    }


def _written_second(config: "DeepseekConfig") -> dict[str, Any]:
    groups, top = config.moe_router_num_groups, config.moe_router_top_groups
    method = "greedy" if groups == 1 else GROUPED
    return {**_written(config), "topk_method": method, "n_group": groups, "topk_group": top}


def _written_third(config: "DeepseekConfig") -> dict[str, Any]:
    return {**_written(config), "num_nextn_predict_layers": config.num_mtp_layers}


V2 = PublicForm(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    fields={
        **decoder_fields(
            vocab_size=102400,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=2048,
        ),
        **rotary_fields(),
        **UNTIED_FIELDS,
        **SLICES_FIELDS,
        **LATENT,
        **EXPERTS,
        **_experts(routed=64, shared=2, width=1407, first=0, scale=1.0),
        "num_key_value_heads": SumField(None, ("num_attention_heads",), or_null=True),
        "head_dim": SumField(None, ("qk_rope_head_dim",), or_null=True),
        "num_experts_per_tok": ReadField(None, Values.integer(), ("num_experts_per_token",), required=True),
        "scoring_func": FixedField("softmax", ("softmax",)),
        "topk_method": ReadField("greedy", Values.one_of("greedy", GROUPED)),
        "n_group": ReadField(None, Values.integer().or_null),
        "topk_group": ReadField(None, Values.integer().or_null),
        "norm_topk_prob": FixedField(False, (False, None), "the library never normalises the gates of DeepSeek-V2"),
        "rope_interleave": FixedField(True, (True,), "the library has no such field for DeepSeek-V2"),
    },
    aliases={"num_experts": "n_routed_experts"},
    settings=_second,
    write=_written_second,
    implied={
        "rope_interleaved": True,
        "moe_router_score": "softmax",
        "moe_router_normalize": False,
        "moe_router_group_best": 1,
    },
    training={**EXPERTS_TRAINING, "mtp_loss_coefficient": 0.3},
    altering={**EXPERTS_ALTERING, "num_mtp_layers": 0},
    longest="max_position_embeddings",
)
V3 = PublicForm(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    fields={
        **decoder_fields(
            vocab_size=129280,
            hidden_size=7168,
            intermediate_size=18432,
            num_hidden_layers=61,
            num_attention_heads=128,
            max_position_embeddings=4096,
        ),
        **rotary_fields(),
        **UNTIED_FIELDS,
        **SLICES_FIELDS,
        **LATENT,
        **EXPERTS,
        **_experts(routed=256, shared=1, width=2048, first=3, scale=2.5),
        "num_key_value_heads": SumField(128, ("num_attention_heads",), or_null=True),
        "head_dim": SumField(None, ("qk_rope_head_dim",)),
        "scoring_func": FixedField("sigmoid", ("sigmoid",)),
        "topk_method": FixedField("noaux_tc", ("noaux_tc",)),
        "n_group": ReadField(8, Values.integer(), ("moe_router_num_groups",)),
        "topk_group": ReadField(4, Values.integer(), ("moe_router_top_groups",)),
        "norm_topk_prob": ReadField(True, Values.flag().or_null, ("moe_router_normalize",), TRUTH),
        "rope_interleave": ReadField(True, Values.flag().or_null, ("rope_interleaved",), TRUTH),
        **unused(
            "these layers predict further tokens in training; they are loaded with model.num_mtp_layers",
            "num_nextn_predict_layers num_mtp_layers",
        ),
    },
    aliases={"num_local_experts": "n_routed_experts"},
    settings=_third,
    write=_written_third,
    implied={"moe_router_score": "sigmoid", "moe_router_group_best": 2, "expert_bias": True},
    training={**EXPERTS_TRAINING, "expert_bias_rate": 0.0, "num_mtp_layers": 0, "mtp_loss_coefficient": 0.3},
    altering={"capacity_factor": None},
    longest="max_position_embeddings",
)
FORMS = (V3, V2)
