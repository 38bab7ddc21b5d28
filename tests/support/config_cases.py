"""Random config.json files of the families that mplug reads, over the fields of transformers' own config classes.

A case has a tiny shape. Each other field is absent, or has a value that published folders have, or one that is rare or
unsupported, or null. A field of transformers' classes that this file does not name gets values by its type, so a field
that a new version of transformers adds occurs without a change here.
"""

import dataclasses
from collections.abc import Callable
from random import Random
from typing import Any

from config_values import FOREIGN, NEUTRAL, RARE, USUAL, Fields, Pool

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
"""`model_type` -> its architecture."""
ABSENT = object()


@dataclasses.dataclass(frozen=True)
class Case:
    """A config.json, and the seed of the weights and of the batch."""

    fields: Fields
    seed: int


def case_of(kind: str, seed: int) -> Case:
    draw = Random(f"{kind} {seed}")
    fields = {"architectures": [ARCHITECTURES[kind]], "model_type": kind, **SHAPES.get(kind, _shape)(draw, kind)}
    if kind not in ("gpt2", "nemotron_h", "kimi_linear"):
        fields |= _rotary(draw, kind, fields)
    defaults = defaults_of(kind)
    if kind == "nemotron_h" and draw.random() < 0.2:
        letters = "".join(draw.choice("M*-E") for _ in range(3))
        fields = {**fields, "layers_block_type": None, "hybrid_override_pattern": letters}
    if "layer_types" in defaults and draw.random() < 0.5:
        fields["layer_types"] = _layer_types(
            draw, fields["num_hidden_layers"], "linear" if kind in LINEAR else "sliding"
        )
        if "sliding_attention" in fields["layer_types"] and draw.random() < 0.95:
            fields["sliding_window"] = draw.choice((3, 6, 4096))
            fields |= {"use_sliding_window": True} if "use_sliding_window" in defaults else {}
    for name in draw.sample(sorted(defaults), draw.choice((0, 2, 4, 8))):
        if name not in fields:
            _put(fields, name, _usual(draw, name, defaults[name]))
    for name in draw.sample(sorted(NEUTRAL), draw.choice((0, 0, 2))):
        fields[name] = NEUTRAL[name]
    if seed % 10 == 3:  # every field in turn, with another value than its default
        names = sorted({*defaults, *aliases_of(kind)})
        name = names[seed // 10 % len(names)]
        fields[name] = _other(draw, name, defaults.get(name, 1))
    elif draw.random() < 0.35:
        for _ in range(draw.choice((1, 1, 2))):
            _strange(draw, fields, defaults)
    return Case(fields, seed)


def defaults_of(kind: str) -> Fields:
    """The fields of transformers' config class of a `model_type`, with their defaults; those without one are None."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = dataclasses.fields(CONFIG_MAPPING[kind])
    found = {one.name: None if one.default is dataclasses.MISSING else one.default for one in fields}
    return {name: default for name, default in found.items() if name not in ("architectures", "rope_parameters")}


def aliases_of(kind: str) -> list[str]:
    """Other names that transformers' class has for its fields."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return sorted(CONFIG_MAPPING[kind].attribute_map)


def _put(fields: Fields, name: str, value: Any) -> None:
    if value is not ABSENT:
        fields[name] = value


def _usual(draw: Random, name: str, default: Any) -> Any:
    """A value that published folders have; sizes keep their defaults, which are absent fields."""
    if name in USUAL:
        return draw.choice(USUAL[name]) if USUAL[name] else ABSENT
    if isinstance(default, bool) or default is None or isinstance(default, str):
        return default
    return ABSENT


def _other(draw: Random, name: str, default: Any) -> Any:
    """Another value than the default of a field."""
    named = [value for value in (*USUAL.get(name, ()), *RARE.get(name, ())) if value != default]
    return draw.choice(named) if named else _of_type(draw, default)


def _strange(draw: Random, fields: Fields, defaults: Fields) -> None:
    """Change the fields in a way that a family may have to refuse."""
    kind = fields["model_type"]
    match draw.choice(("rare", "rare", "null", "type", "foreign", "foreign", "alias", "other", "absent")):
        case "rare":
            name = draw.choice(sorted(set(defaults) & set(RARE)))
            fields[name] = draw.choice(RARE[name])
        case "null":
            fields[draw.choice(sorted({*defaults, *fields} - {"architectures", "model_type"}))] = None
        case "type":
            name = draw.choice(sorted(defaults))
            fields[name] = _of_type(draw, fields.get(name, defaults[name]))
        case "foreign":
            name = draw.choice(sorted(FOREIGN))
            fields[name] = FOREIGN[name]
        case "alias" if aliases_of(kind):
            fields[draw.choice(aliases_of(kind))] = draw.choice((1, 2, 4, 32))
        case "absent":
            name = draw.choice(sorted(set(fields) - {"architectures", "model_type", "vocab_size"}))
            if not isinstance(defaults.get(name), int) or defaults[name] <= 256:
                del fields[name]
        case _:
            fields[draw.choice(("use_gate", "norm_type", "new_field"))] = draw.choice((1, True, "a", [], 0.0, False))


def _of_type(draw: Random, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice((value + 1, max(value // 2, 1), 1, float(value)))
    if isinstance(value, float):
        return draw.choice((value * 2, value + 0.5, 1))
    if isinstance(value, str):
        return draw.choice((value.upper(), "other"))
    return draw.choice((1, 2.0, True, "a", [1]))


# Shapes.


def _shape(draw: Random, kind: str) -> Fields:
    heads = draw.choice((1, 2, 3, 4, 4, 6, 8))
    hidden = heads * draw.choice([width for width in (4, 8, 12, 16) if 16 <= heads * width <= 64])
    fields = {
        "hidden_size": hidden,
        "num_hidden_layers": draw.choice((1, 2, 3, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "intermediate_size": draw.choice((8, 24, 40, 64)),
        "vocab_size": draw.choice((31, 64, 77)),
    }
    if draw.random() < 0.15 and kind in ("llama", "deepseek_v2", "deepseek_v3"):  # elsewhere the default is a number
        del fields["num_key_value_heads"]
    if draw.random() < 0.6 or kind in ("qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss"):
        fields["head_dim"] = draw.choice((4, 8, 10, 16))
    return fields


def _gpt2_shape(draw: Random, kind: str) -> Fields:
    heads = draw.choice((1, 2, 4))
    fields = {
        "n_embd": heads * draw.choice((8, 12, 16)),
        "n_layer": draw.choice((1, 2, 3)),
        "n_head": heads,
        "n_positions": draw.choice((64, 64, 80)),
        "vocab_size": draw.choice((31, 64, 77)),
    }
    return fields | ({"n_inner": draw.choice((24, 40, None))} if draw.random() < 0.5 else {})


def _sparse_shape(draw: Random, kind: str) -> Fields:
    experts = draw.choice((1, 2, 4, 6, 8))
    number = "num_experts" if kind == "qwen3_moe" else "num_local_experts"
    fields = {**_shape(draw, kind), number: experts, "num_experts_per_tok": draw.randint(1, min(experts, 4))}
    return fields | ({"moe_intermediate_size": draw.choice((8, 12, 24))} if kind == "qwen3_moe" else {})


def _latent_shape(draw: Random, kind: str) -> Fields:
    groups, each = draw.choice((1, 1, 2, 4)), draw.choice((2, 3))
    top = draw.randint(1, groups)
    fields = _shape(draw, kind)
    layers = fields["num_hidden_layers"]
    fields |= {
        "kv_lora_rank": draw.choice((8, 12)),
        "q_lora_rank": draw.choice((None, 10)),
        "qk_nope_head_dim": draw.choice((4, 8)),
        "qk_rope_head_dim": draw.choice((2, 4, 8)),
        "v_head_dim": draw.choice((4, 6)),
        "moe_intermediate_size": draw.choice((8, 12)),
        "n_routed_experts": groups * each,
        "n_shared_experts": draw.choice((1, 2)),
        "num_experts_per_tok": draw.randint(1, top * each),
        "n_group": groups,
        "topk_group": top,
        "first_k_dense_replace": draw.randint(0, layers - 1) if draw.random() < 0.95 else layers,
        "num_key_value_heads": draw.choice((fields["num_attention_heads"], None)),
    }
    if kind == "deepseek_v2" and draw.random() < 0.5:
        fields["topk_method"] = "group_limited_greedy" if draw.random() < 0.7 else "greedy"
    fields.pop("head_dim", None)
    return fields


def _mixed_shape(draw: Random, kind: str) -> Fields:
    """Gated delta nets and attention, with experts unless they are Qwen3.5's dense models."""
    groups, width = draw.choice((1, 2, 3)), draw.choice((8, 12))
    fields = {
        **_shape(draw, kind),
        "head_dim": draw.choice((8, 16)),
        "linear_num_key_heads": groups,
        "linear_num_value_heads": groups * draw.choice((1, 2)),
        "linear_key_head_dim": draw.choice((3, 6)),
        "linear_value_head_dim": draw.choice((4, 5)),
    }
    if draw.random() < 0.7:
        fields["full_attention_interval"] = draw.choice((1, 2, 3))
    if kind == "qwen3_5_text":
        return fields
    experts = draw.choice((1, 2, 4, 6))
    shared = {"shared_expert_intermediate_size": draw.choice((8, 12, 20)), "moe_intermediate_size": width}
    return {**fields, **shared, "num_experts": experts, "num_experts_per_tok": draw.randint(1, min(experts, 4))}


def _factors(draw: Random, kind: str) -> Fields:
    """Factors of embeddings, branches, scores and logits, as Granite has them."""
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    return {name: draw.choice((0.25, 0.5, 2, 3.0)) for name in names if draw.random() < 0.5}


def _granite_shape(draw: Random, kind: str) -> Fields:
    return {**_shape(draw, kind), **_factors(draw, kind)}


def _mamba_shape(draw: Random, kind: str) -> Fields:
    """Mamba-2 and attention, experts or none, and a shared MLP."""
    fields, experts, groups = _granite_shape(draw, kind), draw.choice((0, 1, 2, 4, 6)), draw.choice((1, 1, 2))
    heads = groups * draw.choice([n for n in (1, 2, 4) if fields["hidden_size"] % (n * groups) == 0] or [1])
    fields |= {
        "intermediate_size": draw.choice((8, 12)),
        "mamba_n_heads": heads,
        "mamba_n_groups": groups,
        "mamba_d_state": draw.choice((3, 8)),
        "num_local_experts": experts,
        "num_experts_per_tok": draw.randint(1, max(1, min(experts, 4))),
    }
    fields["shared_intermediate_size"] = draw.choice((8, 12, 20))
    if draw.random() < 0.6:
        fields["mamba_expand"] = draw.choice((1, 2))
    if draw.random() < 0.5:
        fields["position_embedding_type"] = draw.choice(("rope", "rope", "nope", None))
    return fields


def _branches_shape(draw: Random, kind: str) -> Fields:
    """Blocks of one part each, with groups of experts."""
    groups, top = draw.choice(((1, 1), (2, 1), (2, 2)))
    each, states = draw.choice((2, 3)), draw.choice((1, 2))
    blocks = ("linear_attention", "moe", "full_attention", "mlp")
    fields = {
        **_shape(draw, "qwen3"),
        "layers_block_type": [draw.choice(blocks) for _ in range(draw.choice((2, 3, 4)))],
        "mamba_num_heads": states * draw.choice((1, 2)),
        "mamba_head_dim": draw.choice((4, 8)),
        "n_groups": states,
        "ssm_state_size": draw.choice((3, 8)),
        "n_routed_experts": groups * each,
        "n_group": groups,
        "topk_group": top,
        "num_experts_per_tok": draw.randint(1, top * each),
        "moe_intermediate_size": draw.choice((8, 12)),
        "moe_shared_expert_intermediate_size": draw.choice((8, 20)),
    }
    fields.pop("num_hidden_layers")
    return fields | ({"time_step_min": draw.choice((0.1, 0.5, 1.0))} if draw.random() < 0.5 else {})


def _kimi_shape(draw: Random, kind: str) -> Fields:
    """Kimi delta attention and latent attention; experts under the library's names for this class."""
    fields = _latent_shape(draw, kind)
    layers = fields["num_hidden_layers"]
    fields |= {"num_local_experts": fields.pop("n_routed_experts"), "pad_token_id": None}
    if draw.random() < 0.3:
        fields["mlp_layer_types"] = [draw.choice(("dense", "sparse")) for _ in range(layers)]
    widths = {"linear_num_heads": draw.choice((1, 2, 3)), "linear_head_dim": draw.choice((4, 6))}
    if draw.random() < 0.6:
        return {**fields, **widths}
    full = sorted(draw.sample(range(1, layers + 1), draw.randint(0, layers)))
    lists = {"full_attn_layers": full, "kda_layers": [n for n in range(1, layers + 1) if n not in full]}
    nested = {"num_heads": widths["linear_num_heads"], "head_dim": widths["linear_head_dim"]}
    return {**fields, "linear_attn_config": {**nested, **lists, "short_conv_kernel_size": draw.choice((3, 4))}}


MIXED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LINEAR = (*MIXED, "granitemoehybrid", "kimi_linear")
"""Kinds whose entries of `layer_types` are of linear or of full attention."""
SHAPES: dict[str, Callable[[Random, str], Fields]] = {
    "gpt2": _gpt2_shape,
    **dict.fromkeys(MIXED, _mixed_shape),
    "granite": _granite_shape,
    "nemotron_h": _branches_shape,
    "kimi_linear": _kimi_shape,
    "granitemoehybrid": _mamba_shape,
    "mixtral": _sparse_shape,
    "qwen3_moe": _sparse_shape,
    "gpt_oss": _sparse_shape,
    "deepseek_v2": _latent_shape,
    "deepseek_v3": _latent_shape,
}


def _layer_types(draw: Random, layers: int, other: str) -> list[str]:
    if draw.random() < 0.05:
        return [draw.choice(("chunked_attention", "attention", "full_attention", "linear_attention"))] * layers
    length = layers if draw.random() < 0.97 else layers + 1
    return [draw.choice(("full_attention", f"{other}_attention")) for _ in range(length)]


# Rotary positions.

THETAS = (1e2, 500, 10000.0, 1e6)


def _rotary(draw: Random, kind: str, fields: Fields) -> Fields:
    width = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    pairs = fields.get("qk_rope_head_dim", width) // 2
    if kind == "gemma3_text" and draw.random() < 0.7:
        return _two_rotaries(draw, pairs)
    match draw.choice(("absent", "theta", "new", "new", "old", "old", "odd")):
        case "absent":
            return {}
        case "theta":
            return {"rope_theta": draw.choice(THETAS)}
        case "new":
            theta = {"rope_theta": draw.choice(THETAS)}
            inside, outside = draw.choice(((theta, {}), (theta, {}), ({}, theta), ({}, {})))
            return {"rope_parameters": {"rope_type": "default", **_scaling(draw, pairs), **inside}, **outside}
        case "old":
            found = _scaling(draw, pairs)
            if "rope_type" in found and draw.random() < 0.5:
                found["type"] = found.pop("rope_type")
            return {"rope_scaling": found or None, "rope_theta": draw.choice(THETAS)}
        case _:
            return _odd_rotary(draw, pairs)


def _odd_rotary(draw: Random, pairs: int) -> Fields:
    """Forms that no one should write, but that a config.json may have."""
    found = {"rope_type": "default", **_scaling(draw, pairs), "rope_theta": draw.choice((*THETAS, 1.0, None))}
    match draw.randrange(7):
        case 0:
            return {"rope_parameters": {}, "rope_scaling": None}
        case 1:
            return {"rope_parameters": None, "rope_theta": None}
        case 2:
            return {"rope_parameters": found, "rope_scaling": _scaling(draw, pairs), "rope_theta": 300.0}
        case 3:
            return {"rope_parameters": {**found, "partial_rotary_factor": draw.choice((0.5, 1.0))}}
        case 4:
            return {"rope_parameters": {**found, "type": draw.choice(("linear", "default", "yarn"))}}
        case 5:
            return {"rope_parameters": {**found, draw.choice(("finetuned", "factor", "low_freq_factor")): 3.0}}
        case _:
            return {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), found)}


def _scaling(draw: Random, pairs: int) -> Fields:
    """A scaling of rotary positions of this number of pairs, with its options, without theta; empty: none."""
    original = {"original_max_position_embeddings": draw.choice((8, 16, 16, 32))} if draw.random() < 0.8 else {}
    factor = {"factor": draw.choice((2.0, 4, 8.0))}
    if draw.random() < 0.08:
        factor = {"factor": draw.choice((1.0, 0.5, 0, None))}
    match draw.choice(("", "linear", "llama3", "yarn", "yarn", "other")):
        case "":
            return {}
        case "linear":
            return {"rope_type": "linear", **factor}
        case "llama3":
            bounds = (1.0, 4.0) if draw.random() < 0.8 else draw.choice(((1.0, 1.0), (4.0, 1.0), (1, 2), (0.5, 32.0)))
            bounded = {"low_freq_factor": bounds[0], "high_freq_factor": bounds[1]}
            return {"rope_type": "llama3", **factor, **bounded, **original}
        case "yarn":
            return {"rope_type": "yarn", **factor, **original, **_yarn_options(draw)}
        case _:
            other = {"rope_type": draw.choice(("dynamic", "dynamic", "longrope", "longrope", "proportional", "su"))}
            if other["rope_type"] == "longrope":
                other |= {"short_factor": [1.5] * pairs, "long_factor": [3.0] * pairs, **original}
            return {**other, **factor}


YARN_OPTIONS: dict[str, Pool] = {
    "beta_fast": (32, 4.0, 0.5, None),
    "beta_slow": (1, 0.25, None, 0, 40),
    "mscale": (1.0, 0.7, 0, None),
    "mscale_all_dim": (1.0, 0.9, 0, None),
    "attention_factor": (1.2, 1, None),
    "truncate": (True, False),
}


def _yarn_options(draw: Random) -> Fields:
    names = [name for name in YARN_OPTIONS if draw.random() < 0.35]
    return {name: draw.choice(YARN_OPTIONS[name]) for name in names}


def _two_rotaries(draw: Random, pairs: int) -> Fields:
    """Gemma 3: positions of blocks with and without windows, in the new and in the old form."""
    if draw.random() < 0.4:
        old = {"rope_theta": draw.choice(THETAS), "rope_local_base_freq": draw.choice(THETAS)}
        old = {name: value for name, value in old.items() if draw.random() < 0.8}
        return old | ({"rope_scaling": _scaling(draw, pairs) or None} if draw.random() < 0.6 else {})
    found: Fields = {}
    for name in ("full_attention", "sliding_attention"):
        theta = {"rope_theta": draw.choice(THETAS)} if draw.random() < 0.8 else {}
        scaled = _scaling(draw, pairs) if name == "full_attention" or draw.random() < 0.2 else {}
        entry: Any = {"rope_type": "default", **scaled, **theta}
        if draw.random() < 0.1:
            entry = draw.choice((None, {}, theta))
        if draw.random() < 0.85:
            found[name] = entry
    more = {"rope_theta": 300.0} if draw.random() < 0.1 else {}
    return {"rope_parameters": found, **more}
