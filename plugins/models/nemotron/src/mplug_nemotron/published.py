"""The config.json of Nemotron-H and Nemotron 3."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mplug_nn import (
    EXPERTS_TRAINING,
    FixedField,
    PublicField,
    PublicForm,
    ReadField,
    SumField,
    Values,
    decoder_fields,
    heads_fields,
    unused,
    written_heads,
)

if TYPE_CHECKING:
    from mplug_nemotron.config import NemotronConfig

LETTERS = {
    "linear_attention": "M",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
    "mamba": "M",  # the names of older releases
    "attention": "*",
}
"""Entry of `layers_block_type` -> letter of the pattern."""
PATTERN = ("layers_block_type", "hybrid_override_pattern", "ME*-")
PATTERN_AHEAD = ("mtp_layers_block_type", "mtp_hybrid_override_pattern", "*E")
"""The fields that state blocks, by names and by letters, and the letters of a config.json that states none."""
TRAINING = "how the weights were drawn"


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The pattern by its letters or by the names of its blocks; the group score is the sum of its two best experts."""
    letters, number = _pattern(values, *PATTERN), values["num_hidden_layers"]
    ahead, depths = _pattern(values, *PATTERN_AHEAD), values["num_nextn_predict_layers"]
    if number is not None and number != len(letters):
        raise ValueError(
            f"its field 'num_hidden_layers' is {number}, but the pattern of its blocks has {len(letters)} of them"
        )
    experts, groups = values["n_routed_experts"], values["n_group"]
    shared = values["moe_shared_expert_intermediate_size"]
    has_experts = "E" in letters or ("E" in ahead and depths > 0)
    if has_experts and experts < 2 * groups:
        raise ValueError(
            f"its field 'n_group' ({groups}) leaves a group of its {experts} experts fewer than 2, and the score of a "
            f"group is that of its 2 best experts"
        )
    return {
        "pattern": _shortest(letters),
        "num_layers": len(letters),
        "mtp_pattern": ahead,
        "num_experts": experts if has_experts else 0,
        "num_shared_experts": int(has_experts),
        "moe_shared_ffn_hidden_size": shared if has_experts else None,
    }


def _pattern(values: Mapping[str, Any], by_name: str, by_letter: str, default: str) -> str:
    """The letters that two fields state."""
    names, letters = values[by_name], values[by_letter]
    if names is not None and not all(one in LETTERS for one in names):
        raise ValueError(f"its field '{by_name}' is not a list of {', '.join(LETTERS)}")
    if letters is not None and not set(letters) <= set(LETTERS.values()):
        raise ValueError(f"its field '{by_letter}' has other letters than {', '.join('M*-E')}")
    stated = [] if letters is None else [letters]
    stated += [] if names is None else ["".join(LETTERS[one] for one in names)]
    if len(set(stated)) > 1:
        raise ValueError(f"its fields '{by_name}' and '{by_letter}' contradict each other")
    if "" in stated:
        raise ValueError(f"its field '{by_name}' is not a list of at least one block")
    return stated[0] if stated else default


def _shortest(letters: str) -> str:
    """The shortest beginning of a pattern that repeats to the whole pattern."""
    lengths = range(1, len(letters) + 1)
    return next(letters[:n] for n in lengths if (letters[:n] * len(letters))[: len(letters)] == letters)


def _written(config: "NemotronConfig") -> dict[str, Any]:
    names = {letter: name for name, letter in reversed(LETTERS.items())}
    letters = "".join(config.letter(number) for number in range(config.num_layers))
    state = config.linear_key_head_dim or config.head_width
    return {
        **written_heads(config),
        "layers_block_type": [names[letter] for letter in letters],
        "num_nextn_predict_layers": config.num_mtp_layers,
        "mtp_layers_block_type": [names[letter] for letter in config.mtp_pattern],
        "num_hidden_layers": len(letters),
        "mamba_num_heads": config.linear_value_heads,
        "mamba_head_dim": config.linear_value_head_dim or state,
        "n_groups": config.linear_key_heads,
        "ssm_state_size": state,
        "n_routed_experts": config.num_experts or 8,
        "moe_intermediate_size": config.expert_width,
        "moe_shared_expert_intermediate_size": config.shared_width or config.expert_width,
    }


def _shared() -> dict[str, PublicField]:
    """The rows of most decoders that Nemotron has too."""
    found = decoder_fields(
        vocab_size=131072,
        hidden_size=4096,
        intermediate_size=21504,
        num_hidden_layers=52,
        num_attention_heads=32,
        max_position_embeddings=4096,
    )
    return {name: row for name, row in found.items() if name not in ("hidden_act", "rms_norm_eps")}


NEMOTRON_H = PublicForm(
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    fields={
        **_shared(),
        "tie_word_embeddings": FixedField(False, (False,), "the library ignores other values"),
        **heads_fields(8, 128, null=()),
        "num_hidden_layers": ReadField(None, Values.integer(most=10_000).or_null),
        "layers_block_type": ReadField(None, Values.names().or_null),
        "hybrid_override_pattern": ReadField(None, Values(_is_text, "a text").or_null),
        "num_nextn_predict_layers": ReadField(0, Values.integer(0)),
        "mtp_layers_block_type": ReadField(None, Values.names().or_null),
        "mtp_hybrid_override_pattern": ReadField(None, Values(_is_text, "a text")),
        "layer_norm_epsilon": ReadField(1e-5, Values.positive(), ("norm_eps",)),
        "rms_norm_eps": SumField(None, ("layer_norm_epsilon",)),
        "norm_eps": SumField(None, ("layer_norm_epsilon",)),
        "attention_head_dim": SumField(None, ("head_dim",)),
        "mlp_hidden_act": FixedField("relu2", ("relu2",)),
        "mamba_hidden_act": FixedField("silu", ("silu",)),
        "mamba_num_heads": ReadField(128, Values.integer(), ("linear_num_value_heads",)),
        "mamba_head_dim": ReadField(64, Values.integer(), ("linear_value_head_dim",)),
        "n_groups": ReadField(8, Values.integer(), ("linear_num_key_heads",)),
        "ssm_state_size": ReadField(128, Values.integer(), ("linear_key_head_dim",)),
        "conv_kernel": ReadField(4, Values.integer(2), ("linear_conv_width",)),
        "time_step_min": ReadField(0.001, Values.positive(), ("time_step_min",)),
        "n_routed_experts": ReadField(8, Values.integer()),
        "num_experts_per_tok": ReadField(2, Values.integer(), ("num_experts_per_token",)),
        "moe_intermediate_size": ReadField(7688, Values.integer(), ("moe_ffn_hidden_size",)),
        "moe_shared_expert_intermediate_size": ReadField(7688, Values.integer()),
        "routed_scaling_factor": ReadField(1.0, Values.positive(), ("moe_router_scale",)),
        "n_group": ReadField(1, Values.integer(), ("moe_router_num_groups",)),
        "topk_group": ReadField(1, Values.integer(), ("moe_router_top_groups",)),
        "norm_topk_prob": ReadField(True, Values.flag(), ("moe_router_normalize",)),
        "n_shared_experts": FixedField(1, (1,), "the library has one shared MLP, whatever the number"),
        "moe_latent_size": ReadField(None, Values.integer().or_null, ("moe_latent_size",)),
        **{name: FixedField(False, (False,)) for name in ("mlp_bias", "use_bias")},
        **{
            name: FixedField(False, (False,), "the library ignores other values")
            for name in ("attention_bias", "mamba_proj_bias")
        },
        "use_conv_bias": FixedField(True, (True,)),
        "residual_in_fp32": FixedField(False, (False,)),
        "hidden_dropout": FixedField(0.0, (0.0,)),
        "sliding_window": FixedField(None, (None,), "the library ignores other values"),
        **unused("the number and the width of heads of Mamba-2 decide its width", "expand"),
        **unused(TRAINING, "rescale_prenorm_residual time_step_max time_step_floor"),
        **unused("the library takes time_step_min and no upper limit", "time_step_limit"),
        **unused("scans have chunks of their own", "chunk_size"),
        **unused("a setting of generation", "num_logits_to_keep mamba_ssm_cache_dtype"),
        **unused("how the library runs the same computation", "use_mamba_kernels moe_shared_expert_overlap"),
        **unused("attention has no positions", "rope_theta rope_scaling partial_rotary_factor"),
        **unused("the library adds the balancing loss by it; mplug always does", "output_router_logits"),
    },
    aliases={
        "layer_types": "layers_block_type",
        "num_local_experts": "n_routed_experts",
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_expand": "expand",
        "mamba_dt_min": "time_step_min",
        "mamba_dt_max": "time_step_max",
        "mamba_dt_limit": "time_step_limit",
        "mamba_dt_init_floor": "time_step_floor",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_chunk_size": "chunk_size",
    },
    settings=_settings,
    write=_written,
    implied={
        "activation": "relu2",
        "tie_embeddings": False,
        "position_types": ("none",),
        "moe_router_score": "sigmoid",
        "moe_router_group_best": 2,
        "expert_bias": True,
    },
    training={**EXPERTS_TRAINING, "expert_bias_rate": 0.0, "num_mtp_layers": 0, "mtp_loss_coefficient": 0.3},
    altering={"capacity_factor": None},
    longest="max_position_embeddings",
)
FORMS = (NEMOTRON_H,)
