"""The config.json of Qwen3-Next: gated delta nets, and in every fourth block attention."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mplug_nn import (
    EXPERTS_ALTERING,
    EXPERTS_TRAINING,
    LAYER_TYPES_FIELDS,
    ROUTER_LOSS_FIELDS,
    PublicField,
    PublicForm,
    ReadField,
    Values,
    decoder_fields,
    heads_fields,
    rotary_fields,
    rotary_settings,
    shortest,
    tied_fields,
    written_heads,
    written_rotary,
)

if TYPE_CHECKING:
    from mplug_qwen.config import QwenConfig

MIXERS = {"linear_attention": "gated_delta", "full_attention": "attention"}
"""Entry of `layer_types` -> entry of `mixer_types`."""
SHARE = Values.positive()
"""The values of the share of a head that rotary positions turn."""
SCANS: dict[str, PublicField] = {
    "linear_num_key_heads": ReadField(16, Values.integer()),
    "linear_num_value_heads": ReadField(32, Values.integer()),
    "linear_key_head_dim": ReadField(128, Values.integer()),
    "linear_value_head_dim": ReadField(128, Values.integer()),
    "linear_conv_kernel_dim": ReadField(4, Values.integer(2), ("linear_conv_width",)),
}


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Mixers, rotary positions of a part of a head, experts in every n-th block, and the shared expert."""
    number, step, dense = values["num_hidden_layers"], values["decoder_sparse_step"], values["mlp_only_layers"] or ()
    sparse = [values["num_experts"] > 0 and i not in dense and (i + 1) % step == 0 for i in range(number)]
    types = ["experts" if one else "mlp" for one in sparse]
    shared, width = values["shared_expert_intermediate_size"], values["moe_intermediate_size"]
    if any(sparse) and shared % width:
        raise ValueError(
            f"its field 'shared_expert_intermediate_size' is {shared}, which is no multiple of moe_intermediate_size, "
            f"{width}"
        )
    return {
        **_rotary(values),
        "mixer_types": _mixers(values),
        **{name: values[name] for name in SCANS if name != "linear_conv_kernel_dim"},
        "num_shared_experts": shared // width if any(sparse) else 0,
        "shared_expert_gate": any(sparse),
        "feed_forward_types": None if all(sparse) or not values["num_experts"] else shortest(types),
    }


def _mixers(values: Mapping[str, Any]) -> tuple[str, ...]:
    found, number = values["layer_types"], values["num_hidden_layers"]
    if found is None:
        every = values["full_attention_interval"]
        found = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(number)]
    if len(found) != number or not all(one in MIXERS for one in found):
        raise ValueError(f"its field 'layer_types' is not a list of {number} of {', '.join(MIXERS)}")
    return shortest([MIXERS[one] for one in found])


def _rotary(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of rotary positions. `rope_parameters` may state the share of a head that they turn."""
    needed = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")
    fields, share = {name: values[name] for name in needed}, values["partial_rotary_factor"]
    for name in ("rope_parameters", "rope_scaling"):
        if fields[name] is not None and "partial_rotary_factor" in fields[name]:
            options = dict(fields[name])
            share = options.pop("partial_rotary_factor")
            problem = ReadField(None, SHARE).check(f"{name}.partial_rotary_factor", share)
            if problem is not None:
                raise ValueError(problem)
            fields[name] = options
    head = values["head_dim"]
    width = int(head * share)
    if width < 2 or width % 2:
        raise ValueError(
            f"its field 'partial_rotary_factor' is {share}, which turns {width} of {head} coordinates of a head, and "
            f"rotary positions need an even number"
        )
    return {**rotary_settings(fields), "rope_fraction": width / head}


def _written(config: "QwenConfig") -> dict[str, Any]:
    rotary = written_rotary(config.rope_theta, config.rope_scaling)
    rotary["rope_parameters"] = {**rotary["rope_parameters"], "partial_rotary_factor": config.rope_fraction}
    named = {ours: theirs for theirs, ours in MIXERS.items()}
    kinds: Sequence[str] = [config.mixer_type(number) for number in range(config.num_layers)]
    if unknown := sorted(set(kinds) - set(named)):
        raise ValueError(f"no entry of 'layer_types' means model.mixer_types={unknown[0]!r}")
    key_width = config.linear_key_head_dim or config.head_width
    return {
        **written_heads(config),
        **rotary,
        "partial_rotary_factor": config.rope_fraction,
        "layer_types": [named[kind] for kind in kinds],
        "linear_num_key_heads": config.linear_key_heads,
        "linear_num_value_heads": config.linear_value_heads,
        "linear_key_head_dim": key_width,
        "linear_value_head_dim": config.linear_value_head_dim or key_width,
        "moe_intermediate_size": config.expert_width,
        "shared_expert_intermediate_size": config.shared_width or config.expert_width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [number for number in range(config.num_layers) if not config.has_experts(number)],
    }


QWEN3_NEXT = PublicForm(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    fields={
        **decoder_fields(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=48,
            num_attention_heads=16,
            max_position_embeddings=32768,
        ),
        **rotary_fields(),
        **tied_fields(False),
        **heads_fields(2, 256, null=()),
        **LAYER_TYPES_FIELDS,
        **ROUTER_LOSS_FIELDS,
        **SCANS,
        "partial_rotary_factor": ReadField(0.25, SHARE),
        "full_attention_interval": ReadField(4, Values.integer()),
        "attention_bias": ReadField(False, Values.flag(), ("qkv_bias", "attention_out_bias")),
        "num_experts": ReadField(512, Values.integer(0), ("num_experts",)),
        "num_experts_per_tok": ReadField(10, Values.integer(), ("num_experts_per_token",)),
        "moe_intermediate_size": ReadField(512, Values.integer(), ("moe_ffn_hidden_size",)),
        "shared_expert_intermediate_size": ReadField(512, Values.integer()),
        "norm_topk_prob": ReadField(True, Values.flag(), ("moe_router_normalize",)),
        "decoder_sparse_step": ReadField(1, Values.integer()),
        "mlp_only_layers": ReadField(None, Values.indices().or_null),
    },
    aliases={"num_local_experts": "num_experts"},
    settings=_settings,
    write=_written,
    implied={"qk_norm": True, "norm": "offset_rmsnorm", "attention_output_gate": True},
    training=EXPERTS_TRAINING,
    altering=EXPERTS_ALTERING,
    longest="max_position_embeddings",
)
