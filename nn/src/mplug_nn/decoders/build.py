"""From a config to a model."""

from dataclasses import replace

from mplug.errors import UsageError
from mplug.layout.inits import Inits
from mplug.model.model import Model
from mplug_nn.decoder import Decoder, decoder_plan
from mplug_nn.decoders.config import DecoderConfig
from mplug_nn.decoders.parts import EmbeddingConfig, PartConfig
from mplug_nn.decoders.widths import FIELD, blocks_beside, parameters_beside
from mplug_nn.head import Head
from mplug_nn.multi_token_prediction import DepthAhead


def build_decoder(config: DecoderConfig) -> Model:
    """Return the decoder that a config describes, with its plan: the whole `build_model` of most families.

    Call it in the hook `build_model`, in which new parameters are on the meta device.
    """
    base = config.base
    if base is None:
        decoder = _decoder(config, config.blocks, config.blocks_ahead, config.embedding_config(), config.output_scale)
        plan = decoder_plan(decoder, _inits(config))
        return Model(decoder, replace(plan, external=config.external_names()))
    if config.vocab_size != base.vocab_size:
        raise UsageError(f"{FIELD}.vocab_size: the vocabulary is no width; remove it")
    blocks, ahead = blocks_beside(config, base), blocks_beside(config, base, ahead=True)
    embedding = replace(config.embedding_config(), scale=base.embedding_config().scale)
    decoder = _decoder(config, blocks, ahead, embedding, config.output_scale * base.hidden_size / config.hidden_size)
    beside = _decoder(base, base.blocks, base.blocks_ahead, base.embedding_config(), base.output_scale)
    plan = decoder_plan(decoder, _inits(base))
    # No published form has these factors of scores and logits, so the plan has no external names.
    return Model(decoder, replace(plan, parameters=parameters_beside(plan.parameters, decoder, beside)))


def refuse_base(config: DecoderConfig, reason: str) -> None:
    """Raise UsageError if a config has a base model of other widths, which a model of its own kind does not know."""
    if config.mup_base is not None:
        raise UsageError(f"{FIELD} does not apply to {reason}; remove it")


def _inits(config: DecoderConfig) -> Inits:
    return Inits.normal(config.init_std, config.residual_init_std)


def _decoder(
    config: DecoderConfig,
    blocks: tuple[PartConfig, ...],
    ahead: tuple[PartConfig, ...],
    embedding: EmbeddingConfig,
    output_scale: float,
) -> Decoder:
    size, vocab = config.hidden_size, config.vocab_size
    return Decoder(
        embedding.build(vocab, size),
        (block.build(size) for block in blocks),
        Head(config.norm_config().build(size), size, vocab, config.output_soft_cap, output_scale),
        tied=embedding.tied,
        depths=[_depth(config, block) for block in ahead],
        ahead_coefficient=config.ahead_coefficient,
    )


def _depth(config: DecoderConfig, block: PartConfig) -> DepthAhead:
    """A depth of multi-token prediction."""
    size, norm = config.hidden_size, config.norm_config()
    return DepthAhead(size, (norm.build(size), norm.build(size), norm.build(size)), block.build(size))
