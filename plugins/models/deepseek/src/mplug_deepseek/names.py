"""The names of DeepSeek's tensors: latent attention, and layers for multi-token prediction."""

from dataclasses import replace
from typing import Any

from mplug_nn import GeneralDecoderConfig, published_names
from mplug_pretrained import ExternalNames, Fused

LATENT = {
    "q_down": "q_a_proj",
    "q_latent_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_latent_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "out": "o_proj",
}
"""Our modules of attention -> the published ones."""


def names(config: GeneralDecoderConfig, *, latent_queries: bool) -> ExternalNames:
    """The names of a dequantised folder. Layers after the last one are those of multi-token prediction.

    Such a layer is known by its projection `eh_proj`; its embedding and its head repeat those of the model.
    """
    others = {ours: theirs for ours, theirs in LATENT.items() if not ours.startswith("q_")}
    modules = LATENT if latent_queries else {"q": "q_proj", **others}
    at = "model.layers.*.self_attn"
    found = published_names(
        config, attention={f"attn.{ours}.weight": f"{at}.{theirs}.weight" for ours, theirs in modules.items()}
    )
    tensors, layers = dict(found.tensors), config.num_layers
    for depth in range(config.num_mtp_layers):
        tensors |= _ahead(found, depth, layers + depth)
    unused = {} if config.num_mtp_layers else {f"model.layers.{layers}": f"model.layers.{layers}.eh_proj.weight"}
    copies: dict[str, str] = {}
    for layer in range(layers, layers + config.num_mtp_layers):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = "embedding.token.weight"
        copies[f"model.layers.{layer}.shared_head.head.weight"] = "head.project.weight"
    return replace(found, tensors=tensors, copies=copies, optional=unused)


def _ahead(found: ExternalNames, depth: int, layer: int) -> dict[str, Any]:
    """The names of a depth of multi-token prediction: its own, and those of its block, which has experts."""
    own, theirs = f"ahead.depths.{depth}", f"model.layers.{layer}"
    names = {"token_norm": "enorm", "hidden_norm": "hnorm", "merge": "eh_proj", "norm": "shared_head.norm"}
    tensors: dict[str, Any] = {f"{own}.{ours}.weight": f"{theirs}.{public}.weight" for ours, public in names.items()}
    for ours, public in found.tensors.items():
        if ours.startswith("blocks.*.") and not ours.startswith("blocks.*.mlp."):
            name = f"{own}.block.{ours.removeprefix('blocks.*.')}"
            tensors[name] = _numbered(public, layer)
    return tensors


def _numbered(public: Any, layer: int) -> Any:
    """A public name with the number of a layer."""
    if isinstance(public, Fused):
        return Fused(*(_numbered(one, layer) for one in public.sources))
    return public if public is None else public.replace("*", str(layer), 1)
