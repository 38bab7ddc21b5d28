"""From a config to an encoder on the meta device, and its plan."""

from mplug import DOCUMENTS, LOSS_WEIGHTS, ExternalNames, Inits, Model, Unit, describe
from mplug_bert.blocks import Encoder, EncoderEmbedding, MaskedHead
from mplug_bert.config import BertConfig, ModernBertConfig
from mplug_bert.names import bert_names, modernbert_names

TOKEN_TYPES = "token_types"
"""The entry with the type of each token, such as the sentence of a pair that it belongs to."""
AXES = ("batch", "sequence")


def build_bert(config: BertConfig) -> Model:
    """BERT, or RoBERTa."""
    size, norm = config.hidden_size, config.norm_config()
    embedding = EncoderEmbedding(
        config.vocab_size,
        norm.build(size),
        num_positions=config.max_position_embeddings,
        offset=config.position_offset,
        num_types=config.num_token_types,
        dropout=config.dropout,
    )
    blocks = [block.build(size) for block in config.block_configs()]
    head = MaskedHead(config.vocab_size, norm.build(size), config.activation)
    encoder = Encoder(embedding, blocks, head, tied=config.tie_embeddings)
    return _planned(encoder, Inits.normal(config.init_std, config.init_std), bert_names(config), (TOKEN_TYPES,))


def build_modernbert(config: ModernBertConfig) -> Model:
    """ModernBERT."""
    size, norm = config.hidden_size, config.norm_config()
    embedding = EncoderEmbedding(config.vocab_size, norm.build(size), dropout=config.dropout)
    blocks = [block.build(size) for block in config.block_configs()]
    head = MaskedHead(
        config.vocab_size,
        norm.build(size),
        config.head_activation,
        norm=norm.build(size),
        dense_bias=config.head_bias,
        output_bias=config.output_bias,
    )
    encoder = Encoder(embedding, blocks, head, tied=config.tie_embeddings)
    into_stream = config.init_std / float((2 * config.num_layers) ** 0.5)
    return _planned(encoder, Inits.normal(config.init_std, into_stream), modernbert_names(config), ())


def _planned(encoder: Encoder, inits: Inits, names: ExternalNames, of_embedding: tuple[str, ...]) -> Model:
    """The model with its plan; `of_embedding` are the optional entries of the embedding."""
    takes = ("hidden", "positions", "keys")
    body = (
        Unit("embedding", ("tokens", "positions", "keys"), ("hidden",), optional=of_embedding),
        *(Unit(f"blocks.{name}", takes, ("hidden",), optional=(DOCUMENTS,)) for name in encoder.blocks),
    )
    plan = describe(encoder, inits).plan(
        units=(*body, Unit("head", ("hidden", "labels"), ("loss", "num_targets"), optional=(LOSS_WEIGHTS,))),
        inference=(*body, Unit("head", ("hidden",), ("logits",), method="logits")),
        context={
            **dict.fromkeys(("tokens", "labels", LOSS_WEIGHTS, "positions", *of_embedding), AXES),
            **dict.fromkeys(("sample_ids", "keys"), ("batch",)),
            DOCUMENTS: ("batch", "documents"),
        },
        activations={"hidden": (*AXES, "embed"), "loss": (), "num_targets": (), "logits": (*AXES, "vocab")},
        external=names,
    )
    return Model(encoder, plan)
