"""A precision with fp64 masters, under names that other distributions claim too."""

from pydantic import BaseModel, ConfigDict

from mplug import Precision, hookimpl


class Tint:
    """bf16 weights and fp64 masters."""

    class Config(BaseModel):
        """No options."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def define_precision(self) -> Precision:
        """Formats that no other precision has together."""
        return Precision(weights="bfloat16", activations="bfloat16", masters="float64", gradients="float64")
