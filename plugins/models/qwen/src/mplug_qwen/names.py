"""The published tensors of Qwen3-Next, whose blocks have different mixers.

G key heads, H value heads, r value heads of a key head, K key width, V value width.
"""

from mplug import ExternalMap, ExternalNames, Factor, Fused
from mplug_nn import GeneralDecoderConfig, ScanConfig, published_names

LAYER = "model.layers.*"
External = str | Fused | tuple[ExternalMap, ...] | None
Names = dict[str, External]
Rows = list[tuple[int, int, str, int, int]]
"""Ranges of rows: the first of ours, their number, the public tensor, its number of rows, and the first of them."""


def names_of(config: GeneralDecoderConfig) -> ExternalNames:
    """The names that most families share, unless blocks have scans or gates as those of Qwen3-Next."""
    if set(config.mixer_types) == {"attention"} and not config.attention_output_gate:
        return published_names(config)
    shared = published_names(config, attention={}, experts=_experts(config))
    blocks: Names = {}
    for number in range(config.num_layers):
        at, scan = f"model.layers.{number}", config.scan_config(number)
        own = _attention(config, f"{at}.self_attn") if scan is None else _delta_net(config, scan, f"{at}.linear_attn")
        blocks |= {f"blocks.{number}.attn.{ours}": theirs for ours, theirs in own.items()}
    return ExternalNames({**shared.tensors, **blocks}, shared.prefix, (*shared.ignored, "mtp"))


def _experts(config: GeneralDecoderConfig) -> Names:
    """Experts, and one shared MLP with a gate."""
    at = f"{LAYER}.mlp"
    found: Names = {
        "moe.router.weight": f"{at}.gate.weight",
        "moe.experts.up": Fused(f"{at}.experts.{{}}.gate_proj.weight", f"{at}.experts.{{}}.up_proj.weight"),
        "moe.experts.down": f"{at}.experts.{{}}.down_proj.weight",
    }
    if config.num_shared_experts:
        projections = (f"{at}.shared_expert.{one}_proj.weight" for one in ("gate", "up"))
        found["moe.shared.up.weight"] = Fused(*projections)
        found["moe.shared.down.weight"] = f"{at}.shared_expert.down_proj.weight"
    if config.shared_expert_gate:
        found["moe.shared_gate.weight"] = f"{at}.shared_expert_gate.weight"
    return found


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


def _delta_net(config: GeneralDecoderConfig, scan: ScanConfig, at: str) -> Names:
    """A gated delta net: the rows of a key head, and of its value heads, follow each other."""
    groups, heads, key, value = scan.num_key_heads, scan.num_value_heads, scan.key_width, scan.value_width
    shared = heads // groups
    keys, values, own = groups * key, heads * value, shared * value
    qkvz, ba, stride = f"{at}.in_proj_qkvz.weight", f"{at}.in_proj_ba.weight", 2 * key + 2 * own
    total, rows = 2 * (keys + values + heads), []
    for group in range(groups):
        at_group, behind = group * stride, 2 * keys + 2 * values
        rows += [
            (group * key, key, qkvz, groups * stride, at_group),
            (keys + group * key, key, qkvz, groups * stride, at_group + key),
            (2 * keys + group * own, own, qkvz, groups * stride, at_group + 2 * key),
            (2 * keys + values + group * own, own, qkvz, groups * stride, at_group + 2 * key + own),
            (behind + group * shared, shared, ba, 2 * heads, 2 * group * shared),
            (behind + heads + group * shared, shared, ba, 2 * heads, 2 * group * shared + shared),
        ]
    channel, tap, one = Factor("channel", 2 * keys + values), Factor("tap", scan.conv_width), Factor("one", 1)
    conv = ExternalMap(((channel,), (tap,)), f"{at}.conv1d.weight", ((channel,), (one,), (tap,)))
    return {
        "inputs.weight": _maps(rows, total, config.hidden_size),
        "conv.weight": (conv,),
        "A_log": f"{at}.A_log",
        "dt_bias": f"{at}.dt_bias",
        "norm": f"{at}.norm.weight",
        "out.weight": f"{at}.out_proj.weight",
    }
