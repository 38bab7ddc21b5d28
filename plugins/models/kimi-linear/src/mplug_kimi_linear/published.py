"""The config.json of Kimi Linear."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mplug_nn import (
    EXPERTS_TRAINING,
    LAYER_TYPES_FIELDS,
    SLICES_FIELDS,
    UNTIED_FIELDS,
    FixedField,
    PublicForm,
    ReadField,
    SumField,
    Values,
    block_types,
    decoder_fields,
    mixer_layer_types,
    unused,
)

if TYPE_CHECKING:
    from mplug_kimi_linear.config import KimiLinearConfig

MIXERS = {"linear_attention": "kimi_delta", "full_attention": "attention"}
"""Entry of `layer_types` -> entry of `mixer_types`."""
FEED_FORWARD = {"dense": "mlp", "sparse": "experts"}
"""Entry of `mlp_layer_types` -> entry of `feed_forward_types`."""
NESTED = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Field of the mapping `linear_attn_config` -> the field beside it, which it replaces."""
LISTS = ("full_attn_layers", "kda_layers")
"""Lists of the numbers of blocks from 1 on, in this mapping."""


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Mixers, widths of Kimi delta attention and blocks with experts; a group's score is the sum of its two best."""
    nested = values["linear_attn_config"]
    mixers, feed_forward = _mixers(values, nested), _feed_forward(values)
    sizes = {name: values[name] for name in NESTED.values()}
    for name, field in NESTED.items():
        if name in nested:
            sizes[field] = nested[name]
            problem = ReadField(None, Values.integer(2 if name == "short_conv_kernel_size" else 1)).check(
                f"linear_attn_config.{name}", nested[name]
            )
            if problem is not None:
                raise ValueError(problem)
    if unknown := sorted(set(nested) - {*NESTED, *LISTS}):
        raise ValueError(f"its field 'linear_attn_config.{unknown[0]}' is unknown to the family")
    has_experts, experts, groups = "experts" in feed_forward, values["num_local_experts"], values["n_group"]
    if has_experts and experts < 2 * groups:
        raise ValueError(
            f"its field 'n_group' ({groups}) leaves a group of its {experts} experts fewer than 2, and the score of a "
            f"group is that of its 2 best experts"
        )
    return {
        "mixer_types": mixers,
        "feed_forward_types": feed_forward if has_experts else None,
        "num_experts": experts if has_experts else 0,
        "num_dense_layers": 0,
        "linear_num_value_heads": sizes["linear_num_heads"],
        "linear_key_head_dim": sizes["linear_head_dim"],
        "linear_conv_width": sizes["linear_conv_kernel_dim"],
    }


def _mixers(values: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[str, ...]:
    found, number = values["layer_types"], values["num_hidden_layers"]
    if found is None and all(name in nested for name in LISTS):
        full, delta = (nested[name] for name in LISTS)
        if sorted([*full, *delta]) != list(range(1, number + 1)):
            raise ValueError(f"its lists 'full_attn_layers' and 'kda_layers' do not name {number} blocks once each")
        found = ["full_attention" if i + 1 in full else "linear_attention" for i in range(number)]
    usual = ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(number)]
    return block_types({**values, "layer_types": found}, MIXERS, usual)


def _feed_forward(values: Mapping[str, Any]) -> tuple[str, ...]:
    number, dense = values["num_hidden_layers"], values["first_k_dense_replace"]
    usual = ["dense" if i < dense else "sparse" for i in range(number)]
    return block_types(values, FEED_FORWARD, usual, field="mlp_layer_types")


def _written(config: "KimiLinearConfig") -> dict[str, Any]:
    numbers = range(config.num_layers)
    width = config.linear_key_head_dim or config.head_width
    return {
        "layer_types": mixer_layer_types(config, MIXERS),
        "mlp_layer_types": ["sparse" if config.has_experts(number) else "dense" for number in numbers],
        "linear_head_dim": width,
        "linear_num_heads": config.linear_value_heads,
        "num_local_experts": config.num_experts or 2,
        "moe_intermediate_size": config.expert_width,
        "num_key_value_heads": config.num_attention_heads,
    }


KIMI_LINEAR = PublicForm(
    architecture="KimiLinearForCausalLM",
    model_type="kimi_linear",
    fields={
        **decoder_fields(
            vocab_size=163840,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=27,
            num_attention_heads=32,
            max_position_embeddings=1048576,
        ),
        **UNTIED_FIELDS,
        **SLICES_FIELDS,
        **LAYER_TYPES_FIELDS,
        "rms_norm_eps": ReadField(1e-5, Values.positive(), ("norm_eps",)),
        "hidden_act": FixedField("silu", ("silu",), "it is also the activation of the short convolutions"),
        "mlp_layer_types": ReadField(None, Values.names().or_null),
        "first_k_dense_replace": ReadField(1, Values.integer(0)),
        "linear_attn_config": ReadField({}, Values.mapping()),
        "linear_head_dim": ReadField(128, Values.integer()),
        "linear_num_heads": ReadField(32, Values.integer()),
        "linear_conv_kernel_dim": ReadField(4, Values.integer(2)),
        "q_lora_rank": ReadField(None, Values.integer().or_null, ("q_lora_rank",)),
        "kv_lora_rank": ReadField(512, Values.integer(), ("kv_lora_rank",)),
        "qk_nope_head_dim": ReadField(128, Values.integer(), ("qk_nope_head_dim",)),
        "qk_rope_head_dim": ReadField(64, Values.integer(), ("qk_rope_head_dim",)),
        "v_head_dim": ReadField(128, Values.integer(), ("v_head_dim",)),
        "num_key_value_heads": SumField(32, ("num_attention_heads",), or_null=True),
        "num_local_experts": ReadField(256, Values.integer()),
        "num_experts_per_tok": ReadField(8, Values.integer(), ("num_experts_per_token",)),
        "n_shared_experts": ReadField(1, Values.integer(), ("num_shared_experts",)),
        "moe_intermediate_size": ReadField(1024, Values.integer(), ("moe_ffn_hidden_size",)),
        "routed_scaling_factor": ReadField(2.446, Values.positive(), ("moe_router_scale",)),
        "n_group": ReadField(1, Values.integer(), ("moe_router_num_groups",)),
        "topk_group": ReadField(1, Values.integer(), ("moe_router_top_groups",)),
        "norm_topk_prob": ReadField(True, Values.flag(), ("moe_router_normalize",)),
        "attention_bias": FixedField(False, (False,)),
        "moe_layer_freq": FixedField(1, (1,)),
        "moe_router_activation_func": FixedField("sigmoid", ("sigmoid",)),
        "use_grouped_topk": FixedField(True, (True,)),
        "mla_use_nope": FixedField(True, (True,)),
        "num_nextn_predict_layers": FixedField(0, (0,), "no published folder has blocks for multi-token prediction"),
        **unused("attention has widths of its own", "head_dim qk_head_dim"),
        **unused("attention has no positions", "rope_theta rope_scaling"),
        **unused("the library adds the balancing loss by it; mplug always does", "output_router_logits"),
    },
    aliases={
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    },
    settings=_settings,
    write=_written,
    implied={
        "activation": "swiglu",
        "position_types": ("none",),
        "moe_router_score": "sigmoid",
        "moe_router_group_best": 2,
        "expert_bias": True,
    },
    training={**EXPERTS_TRAINING, "expert_bias_rate": 0.0},
    altering={"capacity_factor": None},
    longest="max_position_embeddings",
)
FORMS = (KIMI_LINEAR,)
