"""The config.json of Qwen3-Next and of Qwen3.5's decoders: gated delta nets, and in every fourth block attention."""

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
    block_types,
    decoder_fields,
    heads_fields,
    mixer_layer_types,
    rotary_fields,
    rotary_settings,
    shortest,
    tied_fields,
    unused,
    written_heads,
    written_rotary,
)

if TYPE_CHECKING:
    from mplug_qwen.config import QwenConfig

MIXERS = {"linear_attention": "gated_delta", "full_attention": "attention"}
"""Entry of `layer_types` -> entry of `mixer_types`."""
SHARE = Values(lambda value: Values.positive().accepts(value) and value <= 1, "a number above 0 and at most 1")
"""The values of the share of a head that rotary positions turn."""
COORDINATES = ("mrope_section", "mrope_interleaved")
"""Options of rotary positions with three coordinates, which are equal for text."""
AHEAD = "these layers predict further tokens in training; they are loaded with model.num_mtp_layers"
MIXED: dict[str, PublicField] = {
    **rotary_fields(),
    **tied_fields(False),
    **LAYER_TYPES_FIELDS,
    "hidden_act": FixedField("silu", ("silu",), "it is also the activation of the short convolutions"),
    "linear_num_key_heads": ReadField(16, Values.integer()),
    "linear_num_value_heads": ReadField(32, Values.integer()),
    "linear_key_head_dim": ReadField(128, Values.integer()),
    "linear_value_head_dim": ReadField(128, Values.integer()),
    "linear_conv_kernel_dim": ReadField(4, Values.integer(2), ("linear_conv_width",)),
    "partial_rotary_factor": ReadField(0.25, SHARE),
    "full_attention_interval": ReadField(4, Values.integer()),
    "attention_bias": ReadField(False, Values.flag(), ("qkv_bias", "attention_out_bias")),
    "use_sliding_window": FixedField(False, (False,)),
    "attn_output_gate": FixedField(True, (True,)),
    "mamba_ssm_dtype": FixedField("float32", ("float32",), "scans compute in fp32"),
    "mtp_use_dedicated_embeddings": FixedField(False, (False,), "the blocks share the embedding of the model"),
    **unused(AHEAD, "num_nextn_predict_layers mtp_num_hidden_layers"),
}
"""What all of them have."""
EXPERTS: dict[str, PublicField] = {
    **ROUTER_LOSS_FIELDS,
    "num_experts_per_tok": ReadField(10, Values.integer(), ("num_experts_per_token",)),
    "moe_intermediate_size": ReadField(512, Values.integer(), ("moe_ffn_hidden_size",)),
    "shared_expert_intermediate_size": ReadField(512, Values.integer()),
}
IMPLIED = {"qk_norm": True, "norm": "offset_rmsnorm", "attention_output_gate": True, "activation": "swiglu"}
TRAINING = {**EXPERTS_TRAINING, "num_mtp_layers": 0, "mtp_loss_coefficient": 0.3}


def _dense(values: Mapping[str, Any]) -> dict[str, Any]:
    """Mixers, and rotary positions of a part of a head."""
    scans = [name for name in MIXED if name.startswith("linear_") and name != "linear_conv_kernel_dim"]
    return {**_rotary(values), "mixer_types": _mixers(values), **{name: values[name] for name in scans}}


def _some_sparse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen3-Next: experts in every n-th block."""
    number, step, dense = values["num_hidden_layers"], values["decoder_sparse_step"], values["mlp_only_layers"] or ()
    sparse = [values["num_experts"] > 0 and i not in dense and (i + 1) % step == 0 for i in range(number)]
    types = shortest(["experts" if one else "mlp" for one in sparse])
    found = {**_dense(values), "feed_forward_types": None if all(sparse) or not values["num_experts"] else types}
    return found | (_shared(values) if any(sparse) else {"num_shared_experts": 0, "shared_expert_gate": False})


def _all_sparse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen3.5 with experts: every block has them."""
    return {**_dense(values), **_shared(values)}


def _shared(values: Mapping[str, Any]) -> dict[str, Any]:
    """The shared expert, whose output has a gate."""
    width = values["shared_expert_intermediate_size"]
    return {"num_shared_experts": 1, "moe_shared_ffn_hidden_size": width, "shared_expert_gate": True}


def _mixers(values: Mapping[str, Any]) -> tuple[str, ...]:
    number, every = values["num_hidden_layers"], values["full_attention_interval"]
    usual = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(number)]
    return block_types(values, MIXERS, usual)


def _rotary(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of rotary positions. `rope_parameters` may state the share of a head that they turn."""
    needed = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")
    fields, share = {name: values[name] for name in needed}, values["partial_rotary_factor"]
    for name in ("rope_parameters", "rope_scaling"):
        if fields[name] is None:
            continue
        options = {key: value for key, value in fields[name].items() if key not in COORDINATES}
        if "partial_rotary_factor" in options:
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


def _written_mixers(config: "QwenConfig", projections: str) -> dict[str, Any]:
    """The fields of heads, rotary positions and mixers, if the projections are published in this way."""
    if "gated_delta" in config.mixer_types and config.published_scans != projections:
        raise ValueError(f"its projections are those of model.published_scans={projections!r}")
    rotary = written_rotary(config.rope_theta, config.rope_scaling)
    rotary["rope_parameters"] = {**rotary["rope_parameters"], "partial_rotary_factor": config.rope_fraction}
    key_width = config.linear_key_head_dim or config.head_width
    return {
        **written_heads(config),
        **rotary,
        "partial_rotary_factor": config.rope_fraction,
        "layer_types": mixer_layer_types(config, MIXERS),
        "linear_num_key_heads": config.linear_key_heads,
        "linear_num_value_heads": config.linear_value_heads,
        "linear_key_head_dim": key_width,
        "linear_value_head_dim": config.linear_value_head_dim or key_width,
    }


def _written_experts(config: "QwenConfig") -> dict[str, Any]:
    return {
        "moe_intermediate_size": config.expert_width,
        "shared_expert_intermediate_size": config.shared_width or config.expert_width,
    }


def _written_next(config: "QwenConfig") -> dict[str, Any]:
    dense = [number for number in range(config.num_layers) if not config.has_experts(number)]
    experts = {**_written_experts(config), "decoder_sparse_step": 1, "mlp_only_layers": dense}
    return {
        **_written_mixers(config, "by_head"),
        **experts,
        "num_nextn_predict_layers": config.num_mtp_layers,
    }


def _written_apart(config: "QwenConfig") -> dict[str, Any]:
    return {**_written_mixers(config, "apart"), "mtp_num_hidden_layers": config.num_mtp_layers}


def _written_sparse(config: "QwenConfig") -> dict[str, Any]:
    return {**_written_apart(config), **_written_experts(config)}


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
        **heads_fields(2, 256, null=()),
        **MIXED,
        **EXPERTS,
        "num_experts": ReadField(512, Values.integer(0), ("num_experts",)),
        "norm_topk_prob": ReadField(True, Values.flag(), ("moe_router_normalize",)),
        "decoder_sparse_step": ReadField(1, Values.integer()),
        "mlp_only_layers": ReadField(None, Values.indices().or_null),
    },
    settings=_some_sparse,
    write=_written_next,
    implied={**IMPLIED, "published_scans": "by_head"},
    training=TRAINING,
    altering=EXPERTS_ALTERING,
    longest="max_position_embeddings",
)
QWEN3_5 = PublicForm(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    fields={
        **decoder_fields(
            vocab_size=248320,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=32,
            num_attention_heads=16,
            max_position_embeddings=32768,
        ),
        **heads_fields(4, 256, null=()),
        **MIXED,
    },
    settings=_dense,
    write=_written_apart,
    implied={**IMPLIED, "num_experts": 0, "published_scans": "apart"},
    training=TRAINING,
    altering=EXPERTS_ALTERING,
    longest="max_position_embeddings",
)
QWEN3_5_MOE = PublicForm(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    fields={
        **decoder_fields(
            vocab_size=248320,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=40,
            num_attention_heads=16,
            max_position_embeddings=32768,
        ),
        **heads_fields(2, 256, null=()),
        **MIXED,
        **EXPERTS,
        **unused("every block has experts", "intermediate_size"),
        "num_experts": ReadField(256, Values.integer(), ("num_experts",)),
        "num_experts_per_tok": ReadField(8, Values.integer(), ("num_experts_per_token",)),
    },
    settings=_all_sparse,
    write=_written_sparse,
    implied={**IMPLIED, "moe_router_normalize": True, "published_scans": "apart"},
    training=TRAINING,
    altering=EXPERTS_ALTERING,
    longest="max_position_embeddings",
)
