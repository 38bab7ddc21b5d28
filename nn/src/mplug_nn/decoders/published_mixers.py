"""The names of tensors of mixers with a scan that several families share. No torch."""

from mplug_nn.decoders.parts import ScanConfig
from mplug_nn.decoders.published import Names
from mplug_pretrained.external import ExternalMap, Factor


def convolution_map(tensor: str, channels: int, width: int) -> tuple[ExternalMap, ...]:
    """Our weight [C, W] of a short convolution as the tensor [C, 1, W] of torch's convolution."""
    channel, tap, one = Factor("channel", channels), Factor("tap", width), Factor("one", 1)
    return (ExternalMap(((channel,), (tap,)), tensor, ((channel,), (one,), (tap,))),)


def mamba_names(scan: ScanConfig, at: str) -> Names:
    """A Mamba-2 at the module `at`, whose parameters have the order of ours; keys are relative to the mixer."""
    channels = scan.num_value_heads * scan.value_width + 2 * scan.num_key_heads * scan.key_width
    return {
        "inputs.weight": f"{at}.in_proj.weight",
        "conv.weight": convolution_map(f"{at}.conv1d.weight", channels, scan.conv_width),
        "conv.bias": f"{at}.conv1d.bias",
        "A_log": f"{at}.A_log",
        "dt_bias": f"{at}.dt_bias",
        "D": f"{at}.D",
        "norm": f"{at}.norm.weight",
        "out.weight": f"{at}.out_proj.weight",
    }
