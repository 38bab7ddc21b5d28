"""The config of Llama: the fields of every decoder, some with other defaults."""

from pydantic import Field, PositiveFloat, PositiveInt

from mplug_nn import GeneralDecoderConfig, published_names
from mplug_pretrained import ExternalNames


class LlamaConfig(GeneralDecoderConfig):
    """The shape of the decoder; the defaults are those of Llama 3."""

    vocab_size: PositiveInt = Field(128256, description="tokens that the model knows")
    rope_theta: PositiveFloat = Field(5e5, description="base of the rotary frequencies")

    def external_names(self) -> ExternalNames:
        """The names that most families share."""
        return published_names(self)
