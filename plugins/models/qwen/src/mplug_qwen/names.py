"""The published tensors of Qwen3-Next and Qwen3.5, whose blocks have different mixers.

G key heads, H value heads, r value heads of a key head, K key width, V value width.
"""

from mplug_nn import GeneralDecoderConfig, ScanConfig, convolution_map, published_names
from mplug_pretrained import ExternalMap, ExternalNames, Factor, Fused

SERVED = {"attention", "gated_delta"}
"""The mixers that published models have."""
AHEAD = {"token_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "merge": "fc", "norm": "norm"}
"""Our modules of a depth of multi-token prediction -> the published ones."""
External = str | Fused | tuple[ExternalMap, ...] | None
Names = dict[str, External]
Rows = list[tuple[int, int, str, int, int]]
"""Ranges of rows: the first of ours, their number, the public tensor, its number of rows, and the first of them."""


def names_of(config: GeneralDecoderConfig, *, apart: bool) -> ExternalNames | None:
    """The names that most families share, unless blocks have scans or gates as those of Qwen3-Next.

    With `apart`, the projections of gated delta nets are those of Qwen3.5. Some folders of Qwen3.5 hold a model that
    sees, whose tower is not read.
    """
    mixers = set(config.mixer_types)
    if mixers == {"attention"} and not config.attention_output_gate:
        return published_names(config)
    if mixers - SERVED or config.num_mtp_layers > 1:
        return None
    tensors: Names = {
        "embedding.token.weight": "model.embed_tokens.weight",
        "head.norm.weight": "model.norm.weight",
        "head.project.weight": "lm_head.weight",
    }
    for number in range(config.num_layers):
        block = _block(config, number, f"model.layers.{number}", apart=apart)
        tensors |= {f"blocks.{number}.{ours}": theirs for ours, theirs in block.items()}
    if config.num_mtp_layers:
        tensors |= {f"ahead.depths.0.{ours}.weight": f"mtp.{theirs}.weight" for ours, theirs in AHEAD.items()}
        block = _block(config, config.num_layers, "mtp.layers.0", apart=apart)
        tensors |= {f"ahead.depths.0.block.{ours}": theirs for ours, theirs in block.items()}
    ignored = () if config.num_mtp_layers else ("mtp",)
    seeing = {"model.": "model.language_model."} if apart else {}
    return ExternalNames(tensors, "model.", (*ignored, *(("model.visual",) if apart else ())), alternatives=seeing)


def _block(config: GeneralDecoderConfig, number: int, at: str, *, apart: bool) -> Names:
    """A block, by its number; blocks of multi-token prediction follow those of the model."""
    found: Names = {
        "norm1.weight": f"{at}.input_layernorm.weight",
        "norm2.weight": f"{at}.post_attention_layernorm.weight",
    }
    scan = config.scan_config(number)
    if scan is None:
        own = _attention(config, f"{at}.self_attn")
    else:
        rows = (_rows_apart if apart else _rows_by_head)(scan, f"{at}.linear_attn")
        own = _delta_net(config, scan, rows, f"{at}.linear_attn")
    found |= {f"attn.{ours}": theirs for ours, theirs in own.items()}
    if config.has_experts(number):
        return found | {f"moe.{ours}": theirs for ours, theirs in _experts(config, f"{at}.mlp").items()}
    return found | {f"mlp.{ours}": theirs for ours, theirs in _mlp(f"{at}.mlp").items()}


def _mlp(at: str) -> Names:
    return {
        "up.weight": Fused(f"{at}.gate_proj.weight", f"{at}.up_proj.weight"),
        "down.weight": f"{at}.down_proj.weight",
    }


def _experts(config: GeneralDecoderConfig, at: str) -> Names:
    """Experts, and one shared MLP with a gate."""
    found: Names = {
        "router.weight": f"{at}.gate.weight",
        "experts.up": Fused(f"{at}.experts.{{}}.gate_proj.weight", f"{at}.experts.{{}}.up_proj.weight"),
        "experts.down": f"{at}.experts.{{}}.down_proj.weight",
    }
    if config.num_shared_experts:
        found |= {f"shared.{ours}": theirs for ours, theirs in _mlp(f"{at}.shared_expert").items()}
    if config.shared_expert_gate:
        found["shared_gate.weight"] = f"{at}.shared_expert_gate.weight"
    return found | ({"router.last_load": None} if config.moe_balance == "global_batch" else {})


def _maps(rows: Rows, ours: int, width: int | None) -> tuple[ExternalMap, ...]:
    """The maps of these rows of a matrix with `ours` rows and `width` columns; None: of a bias."""
    columns = () if width is None else ((Factor("column", width),),)
    return tuple(
        ExternalMap(
            ((Factor("row", ours, first, count),), *columns),
            tensor,
            ((Factor("row", size, their_first, count),), *columns),
        )
        for first, count, tensor, size, their_first in rows
    )


def _attention(config: GeneralDecoderConfig, at: str) -> Names:
    """Attention; with an output gate, the rows of a head's query and gate follow each other."""
    heads, groups, width, size = config.num_attention_heads, config.kv_heads, config.head_width, config.hidden_size
    gated = config.attention_output_gate
    keys = groups * width
    total = (2 if gated else 1) * heads * width + 2 * keys

    def rows(kind: str) -> Rows:
        q, stride = f"{at}.q_proj.{kind}", (2 if gated else 1) * width
        found: Rows = [(head * width, width, q, heads * stride, head * stride) for head in range(heads)]
        found.append((heads * width, keys, f"{at}.k_proj.{kind}", keys, 0))
        found.append((heads * width + keys, keys, f"{at}.v_proj.{kind}", keys, 0))
        first = heads * width + 2 * keys
        if gated:
            found += [(first + head * width, width, q, heads * stride, head * stride + width) for head in range(heads)]
        return found

    found: Names = {"qkv.weight": _maps(rows("weight"), total, size), "out.weight": f"{at}.o_proj.weight"}
    found |= {"qkv.bias": _maps(rows("bias"), total, None)} if config.qkv_bias else {}
    found |= {"out.bias": f"{at}.o_proj.bias"} if config.attention_out_bias else {}
    return found | ({f"{one}_norm": f"{at}.{one}_norm.weight" for one in "qk"} if config.qk_norm else {})


def _rows_by_head(scan: ScanConfig, at: str) -> Rows:
    """Qwen3-Next: the rows of a key head and of its value heads follow each other, in [q, k, v, z] and in [b, a]."""
    groups, heads, key, value = scan.num_key_heads, scan.num_value_heads, scan.key_width, scan.value_width
    shared = heads // groups
    keys, values, own = groups * key, heads * value, shared * value
    qkvz, ba, stride, behind = f"{at}.in_proj_qkvz.weight", f"{at}.in_proj_ba.weight", 2 * key + 2 * own, 2 * keys
    behind += 2 * values
    rows: Rows = []
    for group in range(groups):
        first = group * stride
        rows += [
            (group * key, key, qkvz, groups * stride, first),
            (keys + group * key, key, qkvz, groups * stride, first + key),
            (2 * keys + group * own, own, qkvz, groups * stride, first + 2 * key),
            (2 * keys + values + group * own, own, qkvz, groups * stride, first + 2 * key + own),
            (behind + group * shared, shared, ba, 2 * heads, 2 * group * shared),
            (behind + heads + group * shared, shared, ba, 2 * heads, 2 * group * shared + shared),
        ]
    return rows


def _rows_apart(scan: ScanConfig, at: str) -> Rows:
    """Qwen3.5: [q, k, v], z, b and a are projections of their own."""
    heads, values = scan.num_value_heads, scan.num_value_heads * scan.value_width
    rows: Rows = []
    first = 0
    mixed = 2 * scan.num_key_heads * scan.key_width + values
    for name, count in (("qkv", mixed), ("z", values), ("b", heads), ("a", heads)):
        rows.append((first, count, f"{at}.in_proj_{name}.weight", count, 0))
        first += count
    return rows


def _delta_net(config: GeneralDecoderConfig, scan: ScanConfig, rows: Rows, at: str) -> Names:
    """A gated delta net, by the rows of its projections."""
    keys, values = scan.num_key_heads * scan.key_width, scan.num_value_heads * scan.value_width
    return {
        "inputs.weight": _maps(rows, 2 * (keys + values + scan.num_value_heads), config.hidden_size),
        "conv.weight": convolution_map(f"{at}.conv1d.weight", 2 * keys + values, scan.conv_width),
        "A_log": f"{at}.A_log",
        "dt_bias": f"{at}.dt_bias",
        "norm": f"{at}.norm.weight",
        "out.weight": f"{at}.out_proj.weight",
    }
