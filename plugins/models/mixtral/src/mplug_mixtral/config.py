"""The config of Mixtral: the fields of every decoder with experts, some with other defaults."""

from pydantic import Field, PositiveFloat, PositiveInt

from mplug_mixtral.names import names
from mplug_nn import SparseDecoderConfig
from mplug_pretrained import ExternalNames


class MixtralConfig(SparseDecoderConfig):
    """The shape of the decoder, the routing of tokens to experts, and the balance of the experts' load."""

    vocab_size: PositiveInt = Field(32000, description="tokens that the model knows")
    rope_theta: PositiveFloat = Field(1e6, description="base of the rotary frequencies")

    def external_names(self) -> ExternalNames | None:
        """Those of Mixtral."""
        return names(self)
