"""The published form that most families share: names of tensors, and the common fields of a config.json. No torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from mplug.config.public import PublicConfig
from mplug.decoders.general import GeneralDecoderConfig
from mplug.layout.external import External, ExternalNames, Fused

LAYER = "model.layers.*"
"""The pattern of a block in published names."""
NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
SANDWICH = {
    "norm1": "input_layernorm",
    "post_norm1": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "post_norm2": "post_feedforward_layernorm",
}
"""Our norms of a block -> the published ones, without and with norms of the outputs of its parts."""
TYPES = {"full_attention": "full", "sliding_attention": "window"}
"""Entry of `layer_types` -> entry of `attention_types`."""
Names = dict[str, External]


def published_names(
    config: GeneralDecoderConfig, *, attention: Names | None = None, experts: Names | None = None
) -> ExternalNames:
    """The names that most families share (those of Llama and Qwen3-MoE), for the parameters that a config has.

    `attention` and `experts` replace the names of a block's attention and of its experts with their router. Their keys
    are relative to the block ('attn.out.weight'), their public names absolute, with '*' for the block (`LAYER`).
    """
    norms = SANDWICH if config.post_norms else NORMS
    block: Names = {f"{ours}.weight": f"{LAYER}.{theirs}.weight" for ours, theirs in norms.items()}
    block |= attention_names(config) if attention is None else attention
    kinds = {config.has_experts(number) for number in range(config.num_layers)}
    if False in kinds:
        block |= mlp_names("mlp", f"{LAYER}.mlp", bias=config.mlp_bias)
    if True in kinds:
        block |= expert_names(config) if experts is None else experts
        block |= _states(config)
    return ExternalNames(
        {
            "embedding.token.weight": "model.embed_tokens.weight",
            **{f"blocks.*.{ours}": theirs for ours, theirs in block.items()},
            "head.norm.weight": "model.norm.weight",
            "head.project.weight": "lm_head.weight",
        },
        prefix="model.",
        ignored=(f"{LAYER}.self_attn.rotary_emb.inv_freq",),  # older releases saved it
    )


def attention_names(config: GeneralDecoderConfig) -> Names:
    """Separate projections to queries, keys and values."""
    at = f"{LAYER}.self_attn"

    def fused(kind: str) -> Fused:
        return Fused(*(f"{at}.{one}_proj.{kind}" for one in "qkv"))

    found: Names = {"attn.qkv.weight": fused("weight"), "attn.out.weight": f"{at}.o_proj.weight"}
    found |= {"attn.qkv.bias": fused("bias")} if config.qkv_bias else {}
    found |= {"attn.out.bias": f"{at}.o_proj.bias"} if config.attention_out_bias else {}
    found |= {f"attn.{one}_norm": f"{at}.{one}_norm.weight" for one in "qk"} if config.qk_norm else {}
    return found | ({"attn.sinks": f"{at}.sinks"} if config.attention_sinks else {})


def mlp_names(ours: str, theirs: str, *, bias: bool = False) -> Names:
    """A gated MLP: separate projections gate and up."""
    found: Names = {}
    for kind in ("weight", "bias") if bias else ("weight",):
        found[f"{ours}.up.{kind}"] = Fused(f"{theirs}.gate_proj.{kind}", f"{theirs}.up_proj.{kind}")
        found[f"{ours}.down.{kind}"] = f"{theirs}.down_proj.{kind}"
    return found


def expert_names(config: GeneralDecoderConfig) -> Names:
    """One tensor for each matrix of each expert; the router, and the shared experts as one MLP."""
    at = f"{LAYER}.mlp"
    found: Names = {
        "moe.router.weight": f"{at}.gate.weight",
        "moe.experts.up": Fused(f"{at}.experts.{{}}.gate_proj.weight", f"{at}.experts.{{}}.up_proj.weight"),
        "moe.experts.down": f"{at}.experts.{{}}.down_proj.weight",
    }
    if config.expert_bias or config.expert_bias_rate:
        found["moe.router.bias"] = f"{at}.gate.e_score_correction_bias"
    if config.num_shared_experts:
        found |= mlp_names("moe.shared", f"{at}.shared_experts")
    return found


def _states(config: GeneralDecoderConfig) -> Names:
    return {"moe.router.last_load": None} if config.moe_balance == "global_batch" else {}


# config.json


def published_settings(
    config: PublicConfig, *, theta: float = 10000.0, rope: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The settings that most families share: sizes, heads, norms, rotary positions.

    `theta` is the family's default. `rope` replaces the config's rotary positions, in the form of `PublicConfig.rope`.
    """
    config.expect("attention_dropout", 0.0, 0)
    heads = config.number("num_attention_heads")
    return {
        "hidden_size": config.number("hidden_size"),
        "num_layers": config.number("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_kv_heads": config.number("num_key_value_heads", heads),
        "head_dim": config.take("head_dim", None),
        "vocab_size": config.number("vocab_size"),
        "ffn_hidden_size": config.number("intermediate_size"),
        "norm_eps": config.take("rms_norm_eps", 1e-6),
        **rotary_settings(config.rope(theta) if rope is None else rope),
    }


def rotary_settings(rope: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and `rope_fraction` of rotary positions in the form of `PublicConfig.rope`."""
    options = {name: value for name, value in rope.items() if value is not None}
    kind, theta = options.pop("rope_type"), options.pop("rope_theta")
    fraction = options.pop("partial_rotary_factor", 1.0)
    scaling = None if kind == "default" else {"type": kind, **options}
    return {"rope_theta": theta, "rope_scaling": scaling, "rope_fraction": fraction}


def training_choices(config: PublicConfig) -> dict[str, Any]:
    """The settings that a user may change although the weights are published."""
    return {
        "init_std": config.take("initializer_range", 0.02),
        "aux_loss_coefficient": config.take("router_aux_loss_coef", 0.0),
        "z_loss_coefficient": 0.0,
        "moe_balance": "sequence",
        "moe_router_jitter": 0.0,
        "expert_bias_rate": 0.0,
        "capacity_factor": None,
        "capacity_dropping": "probability",
    }


def attention_types(config: PublicConfig, num_layers: int, otherwise: Sequence[str]) -> tuple[str, ...]:
    """The types of the blocks' attention, by `layer_types`, or else `otherwise`; as a list that repeats."""
    found = config.take("layer_types", None)
    if found is None:
        return shortest(list(otherwise))
    if not isinstance(found, list) or len(found) != num_layers or not all(one in TYPES for one in found):
        raise ValueError(f"its field 'layer_types' is not a list of {num_layers} of {', '.join(TYPES)}")
    return shortest([TYPES[one] for one in found])


def shortest(types: Sequence[str]) -> tuple[str, ...]:
    """The shortest beginning of a list that repeats to the whole list."""
    lengths = range(1, len(types) + 1)
    length = next(n for n in lengths if all(one == types[place % n] for place, one in enumerate(types)))
    return tuple(types[:length])


def published_config(config: GeneralDecoderConfig, architecture: str, model_type: str) -> dict[str, Any]:
    """The fields of a config.json that most families share."""
    found: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "vocab_size": config.vocab_size,
        "intermediate_size": config.ffn_hidden_size,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "attention_dropout": 0.0,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": rope_of(config),
    }
    return found


def rope_of(config: GeneralDecoderConfig) -> dict[str, Any]:
    """The field `rope_parameters` for the blocks without windows."""
    options: dict[str, Any] = dict(config.rope_scaling or {"type": "default"})
    kind = options.pop("type")
    partial = {"partial_rotary_factor": config.rope_fraction} if config.rope_fraction != 1 else {}
    return {"rope_type": kind, "rope_theta": config.rope_theta, **options, **partial}


def layer_types(config: GeneralDecoderConfig) -> list[str]:
    """The field `layer_types`: an entry per block."""
    named = {ours: theirs for theirs, ours in TYPES.items()}
    return [named[config.entry("attention_types", number)] for number in range(config.num_layers)]
