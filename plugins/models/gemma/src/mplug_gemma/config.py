"""The config of Gemma: the fields of every decoder, some with other defaults."""

from pydantic import Field, PositiveFloat, PositiveInt

from mplug import ExternalNames
from mplug_nn import ActivationName, GeneralDecoderConfig, NormName, published_names


class GemmaConfig(GeneralDecoderConfig):
    """The shape of the decoder. The defaults are common to Gemma 2 and 3; presets set the others."""

    vocab_size: PositiveInt = Field(256000, description="tokens that the model knows")
    norm_eps: PositiveFloat = Field(1e-6, description="added in norms to the variance, or to the mean square")
    norm: NormName = Field("offset_rmsnorm", description="norm before each part of a block, and before the head")
    post_norms: bool = Field(True, description="also a norm of the output of each part of a block")
    activation: ActivationName = Field("geglu_tanh", description="activation of MLPs and experts")
    tie_embeddings: bool = Field(True, description="use the embedding table as the output projection")
    scale_embeddings: bool = Field(True, description="multiply the embeddings by the square root of hidden_size")

    def external_names(self) -> ExternalNames:
        """The names that most families share."""
        return published_names(self)
