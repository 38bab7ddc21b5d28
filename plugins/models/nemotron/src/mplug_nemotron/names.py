"""The published tensors of Nemotron-H: a block has a norm and a `mixer`, whatever it is."""

from collections.abc import Sequence
from typing import Any

from mplug_nn import GeneralDecoderConfig, mamba_names
from mplug_pretrained import ExternalNames, Fused


def names_of(config: GeneralDecoderConfig, letters: str, depths: Sequence[range]) -> ExternalNames:
    """The names of a folder, by the letter of each part, and the numbers of the parts of each depth ahead.

    Newer releases of the transformers library call the module `backbone` `model`. `mtp.layers` are the parts of all
    depths of multi-token prediction. The first part of a depth also has its projection, the last one its norm.
    """
    tensors: dict[str, Any] = {
        "embedding.token.weight": "backbone.embeddings.weight",
        "head.norm.weight": "backbone.norm_f.weight",
        "head.project.weight": "lm_head.weight",
    }
    for number in range(config.num_layers):
        tensors |= _branch(config, letters, number, f"blocks.{number}", f"backbone.layers.{number}")
    for depth, parts in enumerate(depths):
        tensors |= _ahead(config, letters, f"ahead.depths.{depth}", parts)
    ignored = () if depths else ("mtp",)
    return ExternalNames(tensors, "backbone.", ignored, alternatives={"backbone.": "model."})


def _ahead(config: GeneralDecoderConfig, letters: str, own: str, parts: range) -> dict[str, Any]:
    """A depth of multi-token prediction."""
    theirs = [f"mtp.layers.{part - config.num_layers}" for part in parts]
    found: dict[str, Any] = {
        f"{own}.token_norm.weight": f"{theirs[0]}.enorm.weight",
        f"{own}.hidden_norm.weight": f"{theirs[0]}.hnorm.weight",
        f"{own}.merge.weight": f"{theirs[0]}.eh_proj.weight",
        f"{own}.norm.weight": f"{theirs[-1]}.final_layernorm.weight",
    }
    for place, (part, at) in enumerate(zip(parts, theirs, strict=True)):
        found |= _branch(config, letters, part, f"{own}.block.branches.{place}", at)
    return found


def _branch(config: GeneralDecoderConfig, letters: str, number: int, ours: str, at: str) -> dict[str, Any]:
    """Part `number` with its norm."""
    own = {"norm.weight": f"{at}.norm.weight", **_part(config, number, letters[number], f"{at}.mixer")}
    return {f"{ours}.{name}": theirs for name, theirs in own.items()}


def _part(config: GeneralDecoderConfig, number: int, letter: str, at: str) -> dict[str, Any]:
    scan = config.scan_config(number)
    if scan is not None:
        return {f"attn.{ours}": theirs for ours, theirs in mamba_names(scan, at).items()}
    match letter:
        case "*":
            qkv = Fused(*(f"{at}.{one}_proj.weight" for one in "qkv"))
            return {"attn.qkv.weight": qkv, "attn.out.weight": f"{at}.o_proj.weight"}
        case "-":
            return _mlp("mlp", at)
        case _:
            return _experts(config, at)


def _mlp(ours: str, at: str) -> dict[str, Any]:
    return {f"{ours}.{one}.weight": f"{at}.{one}_proj.weight" for one in ("up", "down")}


def _experts(config: GeneralDecoderConfig, at: str) -> dict[str, Any]:
    """Experts without gates, the bias of the choice, and one shared MLP."""
    found = {
        "moe.router.weight": f"{at}.gate.weight",
        **{f"moe.experts.{one}": f"{at}.experts.{{}}.{one}_proj.weight" for one in ("up", "down")},
        **_latent(config, at),
        **(_mlp("moe.shared", f"{at}.shared_experts") if config.num_shared_experts else {}),
    }
    if config.expert_bias or config.expert_bias_rate:
        found["moe.router.bias"] = f"{at}.gate.e_score_correction_bias"
    return found | ({"moe.router.last_load": None} if config.moe_balance == "global_batch" else {})


def _latent(config: GeneralDecoderConfig, at: str) -> dict[str, Any]:
    """The projections of latent experts, if there are any."""
    if config.moe_latent_size is None:
        return {}
    return {
        "moe.latent_down.weight": f"{at}.fc1_latent_proj.weight",
        "moe.latent_up.weight": f"{at}.fc2_latent_proj.weight",
    }
