"""The published tensors of Granite: those of most families, or those of its hybrids."""

from typing import Any

from mplug_nn import GeneralDecoderConfig, mamba_names, published_names
from mplug_pretrained import ExternalNames

SERVED = {"attention", "mamba2"}
"""The mixers that published models have."""


def names_of(config: GeneralDecoderConfig, *, hybrid: bool) -> ExternalNames | None:
    """The names that most families share, or those of Granite 4's hybrids.

    A hybrid without experts has an MLP under the name of the shared one.
    """
    mixers = set(config.mixer_types)
    if mixers - SERVED or config.num_mtp_layers or (not hybrid and "mamba2" in mixers):
        return None
    if not hybrid:
        return published_names(config)
    usual = published_names(config, experts=_experts(config))
    tensors = {ours: theirs for ours, theirs in usual.tensors.items() if not ours.startswith("blocks.*.attn.")}
    of_attention = {ours: theirs for ours, theirs in usual.tensors.items() if ours.startswith("blocks.*.attn.")}
    for number in range(config.num_layers):
        scan = config.scan_config(number)
        if scan is None:
            at = ExternalNames(of_attention)
            tensors |= {name: at.of(name) for name in (ours.replace("*", str(number), 1) for ours in of_attention)}
        else:
            names = mamba_names(scan, f"model.layers.{number}.mamba")
            tensors |= {f"blocks.{number}.attn.{ours}": theirs for ours, theirs in names.items()}
    shared: dict[str, Any] = {f"blocks.*.mlp.{ours}.weight": _shared(theirs) for ours, theirs in SHARED.items()}
    tensors |= {ours: theirs for ours, theirs in shared.items() if ours in tensors}
    return ExternalNames(tensors, usual.prefix, usual.ignored)


SHARED = {"up": "input_linear", "down": "output_linear"}
"""Our projections of an MLP -> the published ones; the first holds gate and up."""


def _shared(projection: str) -> str:
    return f"model.layers.*.shared_mlp.{projection}.weight"


def _experts(config: GeneralDecoderConfig) -> dict[str, Any]:
    """All experts in one tensor, and one shared MLP without a gate."""
    at = "model.layers.*.block_sparse_moe"
    shared = {f"moe.shared.{ours}.weight": _shared(theirs) for ours, theirs in SHARED.items()}
    return {
        "moe.router.weight": f"{at}.router.layer.weight",
        "moe.experts.up": f"{at}.input_linear.weight",
        "moe.experts.down": f"{at}.output_linear.weight",
        **(shared if config.num_shared_experts else {}),
    }
