"""The precisions of torch's own arithmetic: fp32, bf16, fp16 and fp64. The host's distribution supplies them."""

from pydantic import BaseModel, ConfigDict

from mplug.precisions.precision import Precision
from mplug.registry.implementation import hookimpl


class _Native:
    """A precision without options."""

    class Config(BaseModel):
        """No options."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config


class FP32(_Native):
    """Everything in fp32. Matrix products use full fp32, which is torch's default, and not TF32."""

    @hookimpl
    def define_precision(self) -> Precision:
        """Everything in fp32."""
        return Precision(weights="float32", activations="float32")


class BF16(_Native):
    """Weights and activations in bf16, masters and sums in fp32."""

    @hookimpl
    def define_precision(self) -> Precision:
        """A gradient that is one product keeps the format of the weights, because its range is that of fp32."""
        return Precision(weights="bfloat16", activations="bfloat16", gradients="bfloat16")


class FP16(_Native):
    """Weights and activations in fp16 with a dynamic loss scale (arXiv 1710.03740), masters and sums in fp32."""

    @hookimpl
    def define_precision(self) -> Precision:
        """Gradients are scaled, because the range of fp16 is 6e-8 to 65504."""
        return Precision(weights="float16", activations="float16", loss_scaling="dynamic")


class FP64(_Native):
    """Everything in fp64, masters included. Tests use it to distinguish a wrong sum from a rounding error."""

    @hookimpl
    def define_precision(self) -> Precision:
        """Everything in fp64."""
        return Precision(weights="float64", activations="float64", masters="float64", gradients="float64")
