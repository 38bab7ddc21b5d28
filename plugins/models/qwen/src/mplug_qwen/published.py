"""The config.json of Qwen2, Qwen3 and Qwen3-MoE."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mplug_nn import (
    EXPERTS_ALTERING,
    EXPERTS_TRAINING,
    LAYER_TYPES_FIELDS,
    ROUTER_LOSS_FIELDS,
    FixedField,
    PublicField,
    PublicForm,
    ReadField,
    Values,
    attention_types,
    decoder_fields,
    heads_fields,
    layer_types,
    rotary_fields,
    rotary_settings,
    shortest,
    tied_fields,
    written_heads,
    written_rotary,
)
from mplug_qwen.hybrid import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT

if TYPE_CHECKING:
    from mplug_qwen.config import QwenConfig

SHARED: dict[str, PublicField] = {
    **rotary_fields(),
    **tied_fields(False),
    "use_sliding_window": ReadField(False, Values.flag()),
    "sliding_window": ReadField(4096, Values.integer().or_null),
    "use_mrope": FixedField(False, (False,)),
}
"""What all of them have."""
DENSE: dict[str, PublicField] = {
    **decoder_fields(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=22016,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=32768,
    ),
    **SHARED,
    **LAYER_TYPES_FIELDS,
    "max_window_layers": ReadField(28, Values.integer(0)),
}
"""What Qwen2 and Qwen3 have."""
BIASES: dict[str, PublicField] = {"attention_bias": ReadField(False, Values.flag(), ("qkv_bias", "attention_out_bias"))}


def _dense(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions, and windows: blocks from `max_window_layers` on have them, or those of `layer_types`."""
    window = values["sliding_window"] if values["use_sliding_window"] else None
    first = values["num_hidden_layers"] if window is None else values["max_window_layers"]
    types = attention_types(
        values, ["full" if number < first else "window" for number in range(values["num_hidden_layers"])]
    )
    if "window" in types and window is None:
        raise ValueError(
            "its field 'layer_types' has blocks with windows, but it has no window (use_sliding_window, sliding_window)"
        )
    return {
        **rotary_settings(values),
        "attention_types": types,
        "window": window if "window" in types else None,
    }


def _sparse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions, windows in all blocks or none, and the blocks with experts: every n-th, except some."""
    window = values["sliding_window"] if values["use_sliding_window"] else None
    if window is not None and values["max_window_layers"]:
        raise ValueError(
            "its field 'max_window_layers' is not 0, and releases of the library differ in the blocks with windows"
        )
    step, dense = values["decoder_sparse_step"], values["mlp_only_layers"] or ()
    has_experts = values["num_experts"] > 0
    types = [
        "experts" if has_experts and number not in dense and (number + 1) % step == 0 else "mlp"
        for number in range(values["num_hidden_layers"])
    ]
    return {
        **rotary_settings(values),
        "attention_types": ("full",) if window is None else ("window",),
        "window": window,
        "feed_forward_types": None if set(types) == {"experts"} or not has_experts else shortest(types),
    }


def _written_windows(config: "QwenConfig") -> dict[str, Any]:
    """The fields of heads, rotary positions and windows."""
    has_windows = "sliding_attention" in layer_types(config)
    return {
        **written_heads(config),
        **written_rotary(config.rope_theta, config.rope_scaling),
        "use_sliding_window": has_windows,
        "sliding_window": config.window if has_windows else None,
    }


def _written_dense(config: "QwenConfig") -> dict[str, Any]:
    return {**_written_windows(config), "layer_types": layer_types(config)}


def _written_sparse(config: "QwenConfig") -> dict[str, Any]:
    dense = [number for number in range(config.num_layers) if not config.has_experts(number)]
    return {
        **_written_windows(config),
        "moe_intermediate_size": config.expert_width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


QWEN2 = PublicForm(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    # the library has no field 'head_dim', but its layers read it
    fields={**DENSE, **heads_fields(32, None, null=("num_key_value_heads",))},
    settings=_dense,
    write=_written_dense,
    implied={"qk_norm": False, "qkv_bias": True, "attention_out_bias": False},
    training=EXPERTS_TRAINING,
    altering=EXPERTS_ALTERING,
    longest="max_position_embeddings",
)
"""Qwen2 and 2.5."""
QWEN3 = PublicForm(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    fields={**DENSE, **heads_fields(32, 128, null=("num_key_value_heads",)), **BIASES},
    settings=_dense,
    write=_written_dense,
    implied={"qk_norm": True},
    training=EXPERTS_TRAINING,
    altering=EXPERTS_ALTERING,
    longest="max_position_embeddings",
)
QWEN3_MOE = PublicForm(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    fields={
        **decoder_fields(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=24,
            num_attention_heads=32,
            max_position_embeddings=32768,
        ),
        **SHARED,
        **heads_fields(4, None, null=()),
        **BIASES,
        **ROUTER_LOSS_FIELDS,
        "max_window_layers": ReadField(None, Values.integer(0)),  # of older releases
        "num_experts": ReadField(128, Values.integer(0), ("num_experts",)),
        "num_experts_per_tok": ReadField(8, Values.integer(), ("num_experts_per_token",)),
        "moe_intermediate_size": ReadField(768, Values.integer(), ("moe_ffn_hidden_size",)),
        "norm_topk_prob": ReadField(False, Values.flag(), ("moe_router_normalize",)),
        "decoder_sparse_step": ReadField(1, Values.integer()),
        "mlp_only_layers": ReadField(None, Values.indices().or_null),
    },
    aliases={"num_local_experts": "num_experts"},
    settings=_sparse,
    write=_written_sparse,
    implied={"qk_norm": True},
    training=EXPERTS_TRAINING,
    altering=EXPERTS_ALTERING,
    longest="max_position_embeddings",
)
FORMS = (QWEN3, QWEN3_MOE, QWEN2, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)
