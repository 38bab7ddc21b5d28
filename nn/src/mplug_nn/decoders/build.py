"""From a config to a model."""

from dataclasses import replace

from mplug.layout.inits import Inits
from mplug.model.model import Model
from mplug_nn.decoder import Decoder, decoder_plan
from mplug_nn.decoders.config import DecoderConfig
from mplug_nn.decoders.parts import PartConfig
from mplug_nn.head import Head
from mplug_nn.multi_token_prediction import DepthAhead


def build_decoder(config: DecoderConfig) -> Model:
    """Return the decoder that a config describes, with its plan: the whole `build_model` of most families.

    Call it in the hook `build_model`, in which new parameters are on the meta device.
    """
    size, vocab, embedding = config.hidden_size, config.vocab_size, config.embedding_config()
    decoder = Decoder(
        embedding.build(vocab, size),
        (block.build(size) for block in config.blocks),
        Head(config.norm_config().build(size), size, vocab, config.output_soft_cap, config.output_scale),
        tied=embedding.tied,
        depths=[_depth(config, block) for block in config.blocks_ahead],
        ahead_coefficient=config.ahead_coefficient,
    )
    plan = decoder_plan(decoder, Inits.normal(config.init_std, config.residual_init_std))
    return Model(decoder, replace(plan, external=config.external_names()))


def _depth(config: DecoderConfig, block: PartConfig) -> DepthAhead:
    """A depth of multi-token prediction."""
    size, norm = config.hidden_size, config.norm_config()
    return DepthAhead(size, (norm.build(size), norm.build(size), norm.build(size)), block.build(size))
