"""A decoder of linear recurrences: the smallest model whose blocks have a slot that mplug does not know."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from mplug import hookimpl

if TYPE_CHECKING:
    from mplug import Model


class Scanner:
    """Embedding, blocks with a scan, head."""

    class Config(BaseModel):
        """The shape of the decoder."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        num_layers: PositiveInt = Field(2, description="blocks")
        hidden_size: PositiveInt = Field(16, description="width of the residual stream")
        vocab_size: PositiveInt = Field(256, description="tokens that the model knows")
        reverse: bool = Field(False, description="scan from the last position to the first")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_model(self) -> "Model":
        """The decoder on the meta device, and its plan."""
        from acme_scan.decoder import Decoder, make_plan
        from mplug import Model

        return Model(Decoder(self.config), make_plan(self.config))
