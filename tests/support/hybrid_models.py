"""The parameters of the transformers library's hybrids as ours, by hand.

G key heads, H value heads, K key width, V value width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from library_models import Mapped, Tensors, decoder, gpt2


def mapped_of(config: Any) -> Mapped:
    kind = config.model_type
    if kind in HYBRIDS:
        return partial(HYBRIDS[kind], config)
    return gpt2 if kind == "gpt2" else decoder


def layer_of(theirs: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): x for name, x in theirs.items() if name.startswith(prefix)}


def qwen(config: Any, theirs: Tensors) -> Tensors:
    """Qwen3-Next and Qwen3.5: gated delta nets, output gates, a gated shared expert."""
    found = decoder({name.replace("shared_expert.", "shared_experts."): x for name, x in theirs.items()})
    for layer in range(config.num_hidden_layers):
        found |= {
            f"blocks.{layer}.{name}": x for name, x in qwen_layer(config, theirs, f"model.layers.{layer}.").items()
        }
    return found


def qwen_layer(config: Any, theirs: Tensors, prefix: str) -> Tensors:
    """What `library_models.decoder` does not map in a layer."""
    own = layer_of(theirs, prefix)
    found = _delta_net(config, own) if "linear_attn.A_log" in own else _gated_attention(config, own)
    ours = {f"attn.{name}": x for name, x in found.items()}
    gate = "mlp.shared_expert_gate.weight"
    return ours | ({"moe.shared_gate.weight": own[gate]} if gate in own else {})


def _gated_attention(config: Any, own: Tensors) -> Tensors:
    """Rows of q and of the gate in turn, by head."""
    found: Tensors = {}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in own:
            q, gate = own[f"self_attn.q_proj.{kind}"].unflatten(0, (config.num_attention_heads, -1)).chunk(2, dim=1)
            rest = [own[f"self_attn.{one}_proj.{kind}"] for one in "kv"]
            found[f"qkv.{kind}"] = torch.cat((q.flatten(0, 1), *rest, gate.flatten(0, 1)))
    return found


def _delta_net(config: Any, own: Tensors) -> Tensors:
    """One projection [q, k, v, z, b, a]. Those of Qwen3-Next are interleaved by key head, those of Qwen3.5 apart."""
    at = layer_of(own, "linear_attn.")
    if "in_proj_qkv.weight" in at:
        inputs = [at[f"in_proj_{one}.weight"] for one in ("qkv", "z", "b", "a")]
    else:
        groups, key = config.linear_num_key_heads, config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim // groups
        parts = at["in_proj_qkvz.weight"].unflatten(0, (groups, -1)).split((key, key, values, values), dim=1)
        gates = at["in_proj_ba.weight"].unflatten(0, (groups, -1)).chunk(2, dim=1)
        inputs = [part.flatten(0, 1) for part in (*parts, *gates)]
    names = {"A_log": "A_log", "dt_bias": "dt_bias", "norm.weight": "norm", "out_proj.weight": "out.weight"}
    found = {ours: at[name] for name, ours in names.items()}
    return found | {"inputs.weight": torch.cat(inputs), "conv.weight": at["conv1d.weight"][:, 0]}


def granite(config: Any, theirs: Tensors) -> Tensors:
    """Granite 4: Mamba-2 or attention, experts, and a shared MLP without a gate (the only one without experts)."""
    found = decoder(theirs)
    for layer in range(config.num_hidden_layers):
        own = layer_of(theirs, f"model.layers.{layer}.")
        ours = {f"attn.{name}": x for name, x in mamba(layer_of(own, "mamba.")).items()}
        has_experts = "block_sparse_moe.router.weight" in own
        for theirs_of, ours_of in (("input_linear", "up"), ("output_linear", "down")):
            at = "moe.shared" if has_experts else "mlp"
            ours[f"{at}.{ours_of}.weight"] = own[f"shared_mlp.{theirs_of}.weight"]
        if has_experts:
            ours["moe.router.weight"] = own["block_sparse_moe.router.weight"]
            ours["moe.experts.up"] = own["block_sparse_moe.experts.gate_up_proj"]
            ours["moe.experts.down"] = own["block_sparse_moe.experts.down_proj"]
        found |= {f"blocks.{layer}.{name}": x for name, x in ours.items()}
    return found


def mamba(own: Tensors) -> Tensors:
    """A Mamba-2, whose projection has the order of ours; empty if there is none."""
    if not own:
        return {}
    names = {"in_proj.weight": "inputs.weight", "norm.weight": "norm", "out_proj.weight": "out.weight"}
    names |= {name: name for name in ("A_log", "dt_bias", "D")}
    found = {ours: own[name] for name, ours in names.items()}
    return found | {"conv.weight": own["conv1d.weight"][:, 0], "conv.bias": own["conv1d.bias"]}


def nemotron(config: Any, theirs: Tensors) -> Tensors:
    """Nemotron-H: one part per block, called `mixer`."""
    names = {"embedding.token": "model.embeddings", "head.norm": "model.norm_f", "head.project": "lm_head"}
    found = {f"{ours}.weight": theirs[f"{name}.weight"] for ours, name in names.items()}
    for layer, kind in enumerate(config.layers_block_type):
        own = layer_of(theirs, f"model.layers.{layer}.mixer.")
        found[f"blocks.{layer}.norm.weight"] = theirs[f"model.layers.{layer}.norm.weight"]
        if kind == "linear_attention":
            ours = {f"attn.{name}": x for name, x in mamba(own).items()}
        elif kind == "full_attention":
            qkv = torch.cat([own[f"{one}_proj.weight"] for one in "qkv"])
            ours = {"attn.qkv.weight": qkv, "attn.out.weight": own["o_proj.weight"]}
        elif kind == "mlp":
            ours = {f"mlp.{one}.weight": own[f"{one}_proj.weight"] for one in ("up", "down")}
        else:
            ours = {f"moe.experts.{one}": own[f"experts.{one}_proj"] for one in ("up", "down")}
            ours |= {f"moe.shared.{one}.weight": own[f"shared_experts.{one}_proj.weight"] for one in ("up", "down")}
            ours["moe.router.weight"] = own["gate.weight"]
            if config.moe_latent_size is not None:
                for one, name in (("down", "fc1"), ("up", "fc2")):
                    ours[f"moe.latent_{one}.weight"] = own[f"{name}_latent_proj.weight"]
            if "gate.e_score_correction_bias" in own:
                ours["moe.router.bias"] = own["gate.e_score_correction_bias"]
        found |= {f"blocks.{layer}.{name}": x for name, x in ours.items()}
    return found


def kimi(config: Any, theirs: Tensors) -> Tensors:
    """Kimi Linear: Kimi delta attention or latent attention, as DeepSeek-V3 with experts."""
    found = {name: x for name, x in decoder(theirs).items() if ".attn.qkv." not in name}
    for layer, kind in enumerate(config.layer_types):
        if kind == "linear_attention":
            found = {name: x for name, x in found.items() if not name.startswith(f"blocks.{layer}.attn.")}
            own = layer_of(theirs, f"model.layers.{layer}.self_attn.")
            found |= {f"blocks.{layer}.attn.{name}": x for name, x in _kimi_delta(own).items()}
    return found


def _kimi_delta(own: Tensors) -> Tensors:
    names = {"forget_gate.f_a_proj": "decay_down", "forget_gate.f_b_proj": "decay_up", "o_proj": "out"}
    names |= {"g_a_proj": "gate_down", "g_b_proj": "gate_up"}
    return {
        **{f"{ours}.weight": own[f"{name}.weight"] for name, ours in names.items()},
        "inputs.weight": torch.cat([own[f"{one}_proj.weight"] for one in "qkvb"]),
        "conv.weight": own["conv1d.weight"][:, 0],
        "A_log": own["forget_gate.A_log"].flatten(),
        "dt_bias": own["forget_gate.dt_bias"].flatten(),
        "norm": own["o_norm.weight"],
    }


HYBRIDS: dict[str, Callable[[Any, Tensors], Tensors]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), qwen),
    "granitemoehybrid": granite,
    "nemotron_h": nemotron,
    "kimi_linear": kimi,
}
"""By `model_type`, the map of the parameters of a model with this config."""
