"""The config.json of gpt-oss."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mplug_nn import (
    EXPERTS_ALTERING,
    EXPERTS_TRAINING,
    LAYER_TYPES_FIELDS,
    ROUTER_LOSS_FIELDS,
    UNTIED_FIELDS,
    FixedField,
    PublicForm,
    ReadField,
    SumField,
    UnusedField,
    Values,
    attention_types,
    decoder_fields,
    heads_fields,
    layer_types,
    rotary_fields,
    rotary_settings,
    written_heads,
    written_rotary,
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
"""What the library takes if a config.json states no rotary positions at all."""


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    types = ["full" if number % 2 else "window" for number in range(values["num_hidden_layers"])]
    return {**rotary_settings(values, YARN), "attention_types": attention_types(values, types)}


def _written(config: "GptOssConfig") -> dict[str, Any]:
    return {
        **written_heads(config),
        **written_rotary(config.rope_theta, config.rope_scaling),
        "layer_types": layer_types(config),
    }


GPT_OSS = PublicForm(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    fields={
        **decoder_fields(
            vocab_size=201088,
            hidden_size=2880,
            intermediate_size=2880,
            num_hidden_layers=36,
            num_attention_heads=64,
            max_position_embeddings=131072,
        ),
        **heads_fields(8, 64, null=()),
        **rotary_fields(150000.0),
        **UNTIED_FIELDS,
        **LAYER_TYPES_FIELDS,
        **ROUTER_LOSS_FIELDS,
        "rms_norm_eps": ReadField(1e-5, Values.positive(), ("norm_eps",)),
        "attention_bias": ReadField(True, Values.flag(), ("qkv_bias", "attention_out_bias")),
        "sliding_window": ReadField(128, Values.integer(), ("window",)),
        "num_local_experts": ReadField(128, Values.integer(), ("num_experts",)),
        "num_experts_per_tok": ReadField(4, Values.integer(), ("num_experts_per_token",)),
        "experts_per_token": SumField(None, ("num_experts_per_tok",)),  # the library ignores it
        "hidden_act": FixedField("silu", ("silu",), "the library ignores other values for gpt-oss"),
        "swiglu_limit": FixedField(7.0, (7.0,)),
        "swiglu_alpha": FixedField(1.702, (1.702,)),
        "initial_context_length": UnusedField("the scaling of rotary positions states this length itself"),
    },
    aliases={"num_experts": "num_local_experts"},
    settings=_settings,
    write=_written,
    training=EXPERTS_TRAINING,
    altering=EXPERTS_ALTERING,
    longest="max_position_embeddings",
)
FORMS = (GPT_OSS,)
