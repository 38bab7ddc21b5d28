"""Lento: decoders whose tokens meet in a gated linear recurrence, after HGRN (arXiv 2311.04823)."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from mplug import hookimpl

if TYPE_CHECKING:
    from mplug import Model


class Lento:
    """A decoder without attention or positions."""

    class Config(BaseModel):
        """The shape of the decoder."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        num_layers: PositiveInt = Field(4, description="blocks")
        hidden_size: PositiveInt = Field(128, description="width of the residual stream")
        state_size: PositiveInt = Field(128, description="width of the recurrence")
        vocab_size: PositiveInt = Field(256, description="tokens that the model knows")
        init_std: PositiveFloat = Field(0.06, description="standard deviation of initial weights")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_model(self) -> "Model":
        """The decoder on the meta device, and its plan."""
        from mplug import Model
        from nova_lento.decoder import Decoder
        from nova_lento.plan import make_plan

        decoder = Decoder(self.config)
        return Model(decoder, make_plan(decoder, self.config))
