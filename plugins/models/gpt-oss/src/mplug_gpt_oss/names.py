"""The names of gpt-oss: transposed experts with interleaved gate and up projections."""

from mplug_nn import GeneralDecoderConfig, published_names
from mplug_pretrained import ExternalNames, Interleaved, Transposed


def names(config: GeneralDecoderConfig) -> ExternalNames:
    """The names of a dequantised folder."""
    at = "model.layers.*.mlp"
    biases = {
        "moe.experts.up_bias": Interleaved(f"{at}.experts.gate_up_proj_bias"),
        "moe.down_bias": f"{at}.experts.down_proj_bias",
    }
    experts = {
        "moe.router.weight": f"{at}.router.weight",
        **({"moe.router.logit_bias": f"{at}.router.bias"} if config.moe_router_bias else {}),
        "moe.experts.up": Interleaved(Transposed(f"{at}.experts.gate_up_proj")),
        "moe.experts.down": Transposed(f"{at}.experts.down_proj"),
        **(biases if config.expert_projection_bias else {}),
    }
    return published_names(config, experts=experts)
