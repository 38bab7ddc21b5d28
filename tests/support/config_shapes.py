"""Sizes and layer types of generated config.json files, for each architecture."""

from collections.abc import Callable
from random import Random

from config_values import Fields

# Shapes.


def shape_of(draw: Random, kind: str) -> Fields:
    """The sizes of a model of this kind, and the fields that its config must have with them."""
    return SHAPES.get(kind, _shape)(draw, kind)


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


def layer_types_of(draw: Random, layers: int, other: str) -> list[str]:
    if draw.random() < 0.05:
        return [draw.choice(("chunked_attention", "attention", "full_attention", "linear_attention"))] * layers
    length = layers if draw.random() < 0.97 else layers + 1
    return [draw.choice(("full_attention", f"{other}_attention")) for _ in range(length)]
