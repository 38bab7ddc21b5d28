"""Under which settings the fields of the bundled decoders have an effect, for the suites of the families.

Most fields of experts, windows and multi-token prediction do nothing in a family's usual tiny model. `beside` and
`examples` name what else they need; see `mplug_testing.PluginSuite`.
"""

from collections.abc import Mapping
from typing import Any

FIRST_DENSE: dict[str, Any] = {
    "model.num_experts": 4,
    "model.num_experts_per_token": 2,
    "model.moe_ffn_hidden_size": 24,
}
EXPERTS = {**FIRST_DENSE, "model.feed_forward_types": ["experts"]}
GROUPS = {**EXPERTS, "model.moe_router_num_groups": 2, "model.moe_router_top_groups": 1}
TIGHT = {**EXPERTS, "model.capacity_factor": 0.5}
SHARED = {**EXPERTS, "model.num_shared_experts": 1}
WINDOWS = {"model.window": 4, "model.attention_types": ["window", "full"]}
AHEAD = {"model.num_mtp_layers": 1}

OF_EXPERTS = (
    *("moe_ffn_hidden_size", "num_experts_per_token", "num_shared_experts", "moe_router_bias"),
    *("moe_router_score", "moe_router_normalize", "moe_router_scale", "moe_router_jitter", "moe_balance"),
    *("aux_loss_coefficient", "z_loss_coefficient", "expert_bias_rate", "capacity_factor", "expert_projection_bias"),
)
BESIDE: dict[str, Mapping[str, Any]] = {
    **dict.fromkeys(OF_EXPERTS, EXPERTS),
    **dict.fromkeys(("moe_router_num_groups", "moe_router_top_groups", "moe_router_group_best"), GROUPS),
    "num_dense_layers": FIRST_DENSE,
    "mlp_bias": {"model.feed_forward_types": ["mlp"]},
    "expert_bias": {**EXPERTS, "model.expert_bias_rate": 0.0},
    "capacity_dropping": TIGHT,
    "shared_expert_gate": SHARED,
    "feed_forward_types": EXPERTS,
    "window": WINDOWS,
    "attention_types": WINDOWS,
    "window_rope_theta": WINDOWS,
    "mtp_loss_coefficient": AHEAD,
}
EXAMPLES: dict[str, list[Any]] = {
    "feed_forward_types": [["mlp", "experts"]],
    "rope_scaling": [{"type": "linear", "factor": 4.0}],
    "rope_fraction": [0.5],
}


def of_a_family(fields: Any, own: Mapping[str, Mapping[str, Any]] = {}) -> dict[str, Mapping[str, Any]]:
    """`BESIDE` for the fields that a family's Config has, with what the family says itself."""
    known = {f"model.{name}" for name in fields}
    return {
        name: {setting: value for setting, value in one.items() if setting in known}
        for name, one in {**BESIDE, **own}.items()
        if name in fields
    }


def examples_of(fields: Any, own: Mapping[str, list[Any]] = {}) -> dict[str, list[Any]]:
    """`EXAMPLES` for the fields that a family's Config has, with what the family says itself."""
    return {name: one for name, one in {**EXAMPLES, **own}.items() if name in fields}
