"""The names of published tensors. Imports no torch."""

from collections.abc import Iterator

from mplug_llava.config import LlavaConfig
from mplug_llava.vision import VisionConfig
from mplug_pretrained import ExternalMap, ExternalNames, Factor, Fused

TOWER, PROJECTOR, DECODER = "vision_tower.vision_model", "multi_modal_projector", "language_model"
ALTERNATIVES = {f"{TOWER}.": "vision_tower."}
"""Releases of the transformers library from 5 on write the tower without the component 'vision_model'."""
ALONE = "vision_model"
"""Where the tower is in folders of CLIP and SigLIP."""
BESIDE = ("text_model", "logit_scale", "logit_bias", "text_projection", "visual_projection")
"""What whole models of CLIP and SigLIP have beside the tower."""
External = str | Fused | tuple[ExternalMap, ...] | None
KINDS = ("weight", "bias")


def external_names(config: LlavaConfig, decoder: ExternalNames | None) -> ExternalNames | None:
    """The names of LLaVA: those of the decoder's own folders behind 'language_model.'; None if it has none."""
    if decoder is None:
        return None
    inner = decoder.renamed(lambda public: f"{DECODER}.{public}")
    tower = _tower(config.vision, TOWER)
    ends = ("up", "linear_1"), ("down", "linear_2")
    for kind in KINDS if config.projector_bias else KINDS[:1]:
        tower |= {f"tower.projector.{ours}.{kind}": f"{PROJECTOR}.{theirs}.{kind}" for ours, theirs in ends}
    newline = {} if config.tiling is None else {"join.newline": "image_newline"}
    return ExternalNames(
        {**inner.tensors, **tower, **newline},
        ignored=(*inner.ignored, f"{TOWER}.embeddings.position_ids"),
        copies=inner.copies,
        optional=inner.optional,
        alternatives=ALTERNATIVES,
    )


def tower_names(config: VisionConfig) -> ExternalNames:
    """The names of folders of CLIP and SigLIP: of the tower alone, or of a model that also has a tower of text."""
    return ExternalNames(
        _tower(config, ALONE),
        prefix=f"{ALONE}.",  # releases of the transformers library from 5 on write the tower alone without it
        ignored=(f"{ALONE}.embeddings.position_ids", *BESIDE),
    )


def _tower(config: VisionConfig, root: str) -> dict[str, External]:
    """The names of the tower's parameters, whose public names begin with `root`."""
    return {f"tower.{ours}": theirs for ours, theirs in _within_tower(config, root).items()}


def _within_tower(config: VisionConfig, root: str) -> dict[str, External]:
    at, block = f"{root}.embeddings", f"{root}.encoder.layers.*"
    found: dict[str, External] = {
        "patches.project.weight": (_patches(config, f"{at}.patch_embedding.weight"),),
        "patches.position": f"{at}.position_embedding.weight",
    }
    found |= {"patches.first": f"{at}.class_embedding"} if config.class_row else {}
    found |= {"patches.project.bias": f"{at}.patch_embedding.bias"} if config.patch_bias else {}
    for kind in KINDS:
        found |= {f"patches.norm.{kind}": f"{root}.pre_layrnorm.{kind}"} if config.norm_before else {}
        found |= {f"blocks.*.norm{number}.{kind}": f"{block}.layer_norm{number}.{kind}" for number in (1, 2)}
        found["blocks.*.attn.qkv." + kind] = Fused(*(f"{block}.self_attn.{one}_proj.{kind}" for one in "qkv"))
        found["blocks.*.attn.out." + kind] = f"{block}.self_attn.out_proj.{kind}"
        found["blocks.*.mlp.up." + kind] = f"{block}.mlp.fc1.{kind}"
        found["blocks.*.mlp.down." + kind] = f"{block}.mlp.fc2.{kind}"
    return found | {f"projector.unused.{name}": f"{root}.{name}" for name in unused_tensors(config)}


def _patches(config: VisionConfig, tensor: str) -> ExternalMap:
    """The kernel of a convolution whose stride is its size: a product with flattened patches."""
    width = Factor("width", config.hidden_size)
    pixels = (
        Factor("colour", config.channels),
        Factor("row", config.patch_size),
        Factor("column", config.patch_size),
    )
    return ExternalMap(((width,), pixels), tensor, ((width,), *((one,) for one in pixels)))


def unused_tensors(config: VisionConfig) -> dict[str, tuple[int, ...]]:
    """The published tensors of the tower that nothing computes with, by their names in the tower, with their shapes."""
    width, inner = config.hidden_size, config.ffn_hidden_size
    found: dict[str, tuple[int, ...]] = {}
    for number in range(config.used_layers, config.num_layers):
        at = f"encoder.layers.{number}"
        found |= {f"{at}.layer_norm{norm}.{kind}": (width,) for norm in (1, 2) for kind in KINDS}
        found |= dict(_product(f"{at}.mlp.fc1", inner, width)) | dict(_product(f"{at}.mlp.fc2", width, inner))
        for one in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found |= dict(_product(f"{at}.self_attn.{one}", width, width))
    found |= {f"post_layernorm.{kind}": (width,) for kind in KINDS}
    if config.pooling_head:
        found |= {"head.probe": (1, 1, width), "head.attention.in_proj_weight": (3 * width, width)}
        found |= {"head.attention.in_proj_bias": (3 * width,)} | dict(_product("head.attention.out_proj", width, width))
        found |= {f"head.layernorm.{kind}": (width,) for kind in KINDS}
        found |= dict(_product("head.mlp.fc1", inner, width)) | dict(_product("head.mlp.fc2", width, inner))
    return found


def _product(name: str, out: int, into: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (out, into)
    yield f"{name}.bias", (out,)
