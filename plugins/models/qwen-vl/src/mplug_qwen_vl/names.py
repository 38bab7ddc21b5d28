"""The names of published tensors. Imports no torch."""

from dataclasses import replace

from mplug_nn import GeneralDecoderConfig, published_names
from mplug_pretrained import ExternalMap, ExternalNames, Factor, Fused, Transposed
from mplug_qwen_vl.vision import VisionConfig

LAYER = "model.layers.*"
"""A block of the decoder in the names that most families share."""
External = str | Transposed | Fused | tuple[ExternalMap, ...] | None


def external_names(config: GeneralDecoderConfig, vision: VisionConfig | None) -> ExternalNames:
    """The names of Qwen3-VL if there is QK-norm, else those of Qwen2.5-VL."""
    is_third = config.qk_norm
    found = published_names(config, experts=_experts(config))
    found = found.renamed(_in_language_model) if is_third else replace(found, prefix="")
    at = "model.visual" if is_third else "visual"
    if vision is None:
        return replace(found, ignored=(*found.ignored, at))
    tower = _third(vision, at) if is_third else _second(vision, at)
    return replace(found, tensors={**found.tensors, **{f"tower.{ours}": theirs for ours, theirs in tower.items()}})


def _experts(config: GeneralDecoderConfig) -> dict[str, External] | None:
    """One tensor for the matrices of all experts, transposed; None for experts that no folder has."""
    if config.num_shared_experts or config.expert_bias or config.expert_bias_rate:
        return None
    return {
        "moe.router.weight": f"{LAYER}.mlp.gate.weight",
        "moe.experts.up": Transposed(f"{LAYER}.mlp.experts.gate_up_proj"),
        "moe.experts.down": Transposed(f"{LAYER}.mlp.experts.down_proj"),
    }


def _in_language_model(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def _second(config: VisionConfig, at: str) -> dict[str, External]:
    """The tower of Qwen2.5-VL."""
    block = f"{at}.blocks.*"
    found: dict[str, External] = _shared(config, at)
    for kind in ("weight", "bias"):
        found[f"blocks.*.mlp.up.{kind}"] = Fused(f"{block}.mlp.gate_proj.{kind}", f"{block}.mlp.up_proj.{kind}")
        found[f"blocks.*.mlp.down.{kind}"] = f"{block}.mlp.down_proj.{kind}"
        found |= {
            f"merger.{ours}.{kind}": f"{at}.merger.mlp.{place}.{kind}" for ours, place in (("up", 0), ("down", 2))
        }
    return found | {f"merger.norm.{kind}": f"{at}.merger.ln_q.{kind}" for kind in _of_norms(config)}


def _third(config: VisionConfig, at: str) -> dict[str, External]:
    """The tower of Qwen3-VL."""
    block = f"{at}.blocks.*"
    found: dict[str, External] = _shared(config, at)
    mergers = {"merger": f"{at}.merger"}
    mergers |= {"deepstack.*": f"{at}.deepstack_merger_list.*"} if config.deepstack_blocks else {}
    for ours, number in (("up", 1), ("down", 2)):
        for kind in ("weight", "bias"):
            found[f"blocks.*.mlp.{ours}.{kind}"] = f"{block}.mlp.linear_fc{number}.{kind}"
            found |= {f"{own}.{ours}.{kind}": f"{theirs}.linear_fc{number}.{kind}" for own, theirs in mergers.items()}
    for own, theirs in mergers.items():
        found |= {f"{own}.norm.{kind}": f"{theirs}.norm.{kind}" for kind in _of_norms(config)}
    return found | ({"patches.position": f"{at}.pos_embed.weight"} if config.position_grid is not None else {})


def _shared(config: VisionConfig, at: str) -> dict[str, External]:
    """The projection of patches, norms and attention."""
    block = f"{at}.blocks.*"
    found: dict[str, External] = {"patches.project.weight": (_patches(config, f"{at}.patch_embed.proj.weight"),)}
    if config.patch_bias:
        found["patches.project.bias"] = f"{at}.patch_embed.proj.bias"
    for norm in ("norm1", "norm2"):
        found |= {f"blocks.*.{norm}.{kind}": f"{block}.{norm}.{kind}" for kind in _of_norms(config)}
    for ours, theirs in (("qkv", "qkv"), ("out", "proj")):
        found |= {f"blocks.*.attn.{ours}.{kind}": f"{block}.attn.{theirs}.{kind}" for kind in ("weight", "bias")}
    return found


def _of_norms(config: VisionConfig) -> tuple[str, ...]:
    return ("weight", "bias") if config.norm_bias else ("weight",)


def _patches(config: VisionConfig, tensor: str) -> ExternalMap:
    """The kernel of a convolution whose stride is its size: a product with flattened patches."""
    width = Factor("width", config.hidden_size)
    colours, frames = Factor("colour", config.channels), Factor("frame", config.patch_frames)
    rows, columns = Factor("row", config.patch_size), Factor("column", config.patch_size)
    pixels = (colours, frames, rows, columns)
    return ExternalMap(((width,), pixels), tensor, ((width,), *((one,) for one in pixels)))
