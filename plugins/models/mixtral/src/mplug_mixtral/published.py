"""Mixtral's config.json (arXiv 2401.04088)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mplug_nn import (
    ROUTER_LOSS_FIELDS,
    UNTIED_FIELDS,
    FixedField,
    PublicForm,
    ReadField,
    Values,
    decoder_fields,
    heads_fields,
    rotary_fields,
    rotary_settings,
    written_heads,
    written_rotary,
)

if TYPE_CHECKING:
    from mplug_mixtral.config import MixtralConfig


def _rotary(values: Mapping[str, Any]) -> dict[str, Any]:
    found = rotary_settings(values)
    scaling = found.pop("rope_scaling")
    if scaling is not None:
        raise ValueError(f"it scales its rotary positions ('{scaling['type']}'), which the family does not support")
    return found


def _written(config: "MixtralConfig") -> dict[str, Any]:
    rope = written_rotary(config.rope_theta, None)
    return {**written_heads(config), **rope, "intermediate_size": config.expert_width}


MIXTRAL = PublicForm(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    fields={
        **decoder_fields(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=131072,
        ),
        **heads_fields(8, None, null=("head_dim",)),
        **rotary_fields(1e6),
        **UNTIED_FIELDS,
        **ROUTER_LOSS_FIELDS,
        "rms_norm_eps": ReadField(1e-5, Values.positive(), ("norm_eps",)),
        "hidden_act": FixedField("silu", ("silu", "swish")),
        "sliding_window": FixedField(None, (None,), "the family has no windows"),
        "num_local_experts": ReadField(8, Values.integer(), ("num_experts",)),
        "num_experts_per_tok": ReadField(2, Values.integer(), ("num_experts_per_token",)),
        "router_jitter_noise": ReadField(0.0, Values.share(), ("moe_router_jitter",), training=True),
    },
    aliases={"num_experts": "num_local_experts"},
    settings=_rotary,
    write=_written,
    implied={"moe_router_normalize": True},
    training={"z_loss_coefficient": 0.0, "moe_balance": "sequence", "capacity_dropping": "probability"},
    altering={"capacity_factor": None},
    longest="max_position_embeddings",
)
FORMS = (MIXTRAL,)
