"""The published tensors of Kimi Linear. W width of the convolution."""

from typing import Any

from mplug_nn import LatentDecoderConfig, ScanConfig, published_names
from mplug_pretrained import ExternalMap, ExternalNames, Factor, Fused

SERVED = {"attention", "kimi_delta"}
"""The mixers that published models have."""
LATENT = {
    "q_down": "q_a_proj",
    "q_latent_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "q": "q_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_latent_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "out": "o_proj",
}
"""Our modules of latent attention -> the published ones."""
DELTA = {
    "decay_down.weight": "f_a_proj.weight",
    "decay_up.weight": "f_b_proj.weight",
    "dt_bias": "dt_bias",
    "gate_down.weight": "g_a_proj.weight",
    "gate_up.weight": "g_b_proj.weight",
    "norm": "o_norm.weight",
    "out.weight": "o_proj.weight",
}
"""Our parameters of Kimi delta attention -> the published ones of the same shape."""
MOE = "model.layers.*.block_sparse_moe"


def names_of(config: LatentDecoderConfig) -> ExternalNames | None:
    """The names of a folder; None for a model with other mixers, or with multi-token prediction."""
    if set(config.mixer_types) - SERVED or config.num_mtp_layers:
        return None
    shared = published_names(config, attention={}, experts=_experts(config))
    tensors: dict[str, Any] = dict(shared.tensors)
    absent = "q_" if config.q_lora_rank is None else "q"
    for number in range(config.num_layers):
        scan, at = config.scan_config(number), f"model.layers.{number}.self_attn"
        if scan is not None:
            own = _delta(scan, at)
        else:
            names = {ours: theirs for ours, theirs in LATENT.items() if not _is_absent(ours, absent)}
            own = {f"{ours}.weight": f"{at}.{theirs}.weight" for ours, theirs in names.items()}
        tensors |= {f"blocks.{number}.attn.{ours}": theirs for ours, theirs in own.items()}
    dense = [f"model.layers.{number}." for number in range(config.num_layers) if not config.has_experts(number)]
    other = {f"{at}mlp.": f"{at}block_sparse_moe." for at in dense}  # as the transformers library saves them
    return ExternalNames(tensors, shared.prefix, shared.ignored, alternatives=other)


def _is_absent(ours: str, absent: str) -> bool:
    """Whether latent attention lacks a module: 'q' with latent queries, those that begin with 'q_' without."""
    return ours == "q" if absent == "q" else ours.startswith("q_")


def _experts(config: LatentDecoderConfig) -> dict[str, Any]:
    found: dict[str, Any] = {
        "moe.router.weight": f"{MOE}.gate.weight",
        "moe.experts.up": Fused(f"{MOE}.experts.{{}}.w1.weight", f"{MOE}.experts.{{}}.w3.weight"),
        "moe.experts.down": f"{MOE}.experts.{{}}.w2.weight",
    }
    if config.expert_bias or config.expert_bias_rate:
        found["moe.router.bias"] = f"{MOE}.gate.e_score_correction_bias"
    if config.num_shared_experts:
        at = f"{MOE}.shared_experts"
        found["moe.shared.up.weight"] = Fused(f"{at}.gate_proj.weight", f"{at}.up_proj.weight")
        found["moe.shared.down.weight"] = f"{at}.down_proj.weight"
    return found


def _delta(scan: ScanConfig, at: str) -> dict[str, Any]:
    """Separate projections and convolutions of q, k and v; the rates of decay have four dimensions."""
    heads = scan.num_value_heads
    keys, values = heads * scan.key_width, heads * scan.value_width
    head, tap, one = Factor("head", heads), Factor("tap", scan.conv_width), Factor("one", 1)
    ones = [(Factor(f"one {number}", 1),) for number in range(3)]
    rates = ExternalMap(((head,),), f"{at}.A_log", (*ones[:2], (head,), ones[2]))
    convolutions, first = [], 0
    for name, channels in (("q", keys), ("k", keys), ("v", values)):
        ours, theirs = Factor("channel", 2 * keys + values, first, channels), Factor("channel", channels)
        convolutions.append(ExternalMap(((ours,), (tap,)), f"{at}.{name}_conv1d.weight", ((theirs,), (one,), (tap,))))
        first += channels
    return {
        "inputs.weight": Fused(*(f"{at}.{name}_proj.weight" for name in "qkvb")),
        "conv.weight": tuple(convolutions),
        "A_log": (rates,),
        **{ours: f"{at}.{theirs}" for ours, theirs in DELTA.items()},
    }
