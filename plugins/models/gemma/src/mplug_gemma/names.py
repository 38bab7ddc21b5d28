"""The names of published tensors. Imports no torch."""

from dataclasses import replace

from mplug_gemma.vision import VisionConfig
from mplug_nn import GeneralDecoderConfig, published_names
from mplug_pretrained import ExternalMap, ExternalNames, Factor, Fused, Transposed

DECODER, TOWER, PROJECTOR = "language_model.", "vision_tower.vision_model", "multi_modal_projector"
ALTERNATIVES = {f"{TOWER}.": "vision_tower."}
"""Releases of the transformers library from 5 on write the tower without the component 'vision_model'."""
External = str | Transposed | Fused | tuple[ExternalMap, ...]


def external_names(config: GeneralDecoderConfig, vision: VisionConfig | None) -> ExternalNames:
    """The names of the decoder's tensors, and with a tower those of the whole."""
    found = published_names(config)
    if vision is None:
        return found
    inner = found.renamed(lambda public: f"{DECODER}{public}")
    tower = {f"tower.{ours}": theirs for ours, theirs in _tower(vision).items()}
    return replace(inner, tensors={**inner.tensors, **tower}, prefix="", alternatives=ALTERNATIVES)


def _tower(config: VisionConfig) -> dict[str, External]:
    block = f"{TOWER}.encoder.layers.*"
    found: dict[str, External] = {
        "patches.project.weight": (_patches(config, f"{TOWER}.embeddings.patch_embedding.weight"),),
        "patches.project.bias": f"{TOWER}.embeddings.patch_embedding.bias",
        "patches.position": f"{TOWER}.embeddings.position_embedding.weight",
        "projector.norm.weight": f"{PROJECTOR}.mm_soft_emb_norm.weight",
        "projector.project.weight": Transposed(f"{PROJECTOR}.mm_input_projection_weight"),
    }
    for kind in ("weight", "bias"):
        found[f"projector.post_norm.{kind}"] = f"{TOWER}.post_layernorm.{kind}"
        found[f"blocks.*.attn.qkv.{kind}"] = Fused(*(f"{block}.self_attn.{one}_proj.{kind}" for one in "qkv"))
        found[f"blocks.*.attn.out.{kind}"] = f"{block}.self_attn.out_proj.{kind}"
        for number, name in ((1, "up"), (2, "down")):
            found[f"blocks.*.norm{number}.{kind}"] = f"{block}.layer_norm{number}.{kind}"
            found[f"blocks.*.mlp.{name}.{kind}"] = f"{block}.mlp.fc{number}.{kind}"
    return found


def _patches(config: VisionConfig, tensor: str) -> ExternalMap:
    """The kernel of a convolution whose stride is its size: a product with flattened patches."""
    width, colours = Factor("width", config.hidden_size), Factor("colour", config.channels)
    pixels = (colours, Factor("row", config.patch_size), Factor("column", config.patch_size))
    return ExternalMap(((width,), pixels), tensor, ((width,), *((one,) for one in pixels)))
