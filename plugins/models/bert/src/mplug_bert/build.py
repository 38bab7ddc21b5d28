"""From a config to an encoder on the meta device, and its plan."""

from mplug import DOCUMENTS, LOSS_WEIGHTS, Inits, Model, Unit, describe
from mplug_bert.blocks import Encoder, EncoderEmbedding, MaskedHead
from mplug_bert.config import BertConfig, EncoderConfig, ModernBertConfig
from mplug_bert.heads import ClassHead, EmbeddingHead
from mplug_bert.names import bert_names, modernbert_names
from mplug_pretrained import ExternalNames

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
    encoder = Encoder(embedding, blocks, _bert_head(config), tied=config.tie_embeddings)
    inits = Inits.normal(config.init_std, config.init_std)
    return _planned(config, encoder, inits, bert_names(config), (TOKEN_TYPES,))


def _bert_head(config: BertConfig) -> "MaskedHead | ClassHead | EmbeddingHead":
    size = config.hidden_size
    if config.head == "masked":
        return MaskedHead(config.vocab_size, config.norm_config().build(size), config.activation)
    if config.head == "embedding":
        return EmbeddingHead(mean=config.pooling == "mean", temperature=config.temperature)
    is_text = config.head == "sequences"
    dropout = config.dropout_of_classes
    return ClassHead(
        size,
        len(config.labels),
        mean=is_text and config.pooling == "mean",
        dense=is_text,
        dropout=dropout,
        first_dropout=dropout if is_text and config.is_roberta else 0.0,
    )


def build_modernbert(config: ModernBertConfig) -> Model:
    """ModernBERT."""
    size, norm = config.hidden_size, config.norm_config()
    embedding = EncoderEmbedding(config.vocab_size, norm.build(size), dropout=config.dropout)
    blocks = [block.build(size) for block in config.block_configs()]
    encoder = Encoder(embedding, blocks, _modern_head(config), tied=config.tie_embeddings)
    into_stream = config.init_std / float((2 * config.num_layers) ** 0.5)
    return _planned(config, encoder, Inits.normal(config.init_std, into_stream), modernbert_names(config), ())


def _modern_head(config: ModernBertConfig) -> "MaskedHead | ClassHead | EmbeddingHead":
    size, norm, mean = config.hidden_size, config.norm_config(), config.pooling == "mean"
    if config.head == "embedding":
        return EmbeddingHead(norm=norm.build(size), mean=mean, temperature=config.temperature)
    if config.head == "masked":
        return MaskedHead(
            config.vocab_size,
            norm.build(size),
            config.head_activation,
            norm=norm.build(size),
            dense_bias=config.head_bias,
            output_bias=config.output_bias,
        )
    return ClassHead(
        size,
        len(config.labels),
        norm=norm.build(size),
        mean=mean and config.head == "sequences",
        dense_bias=config.head_bias,
        activation=config.head_activation,
        dense_norm=norm.build(size),
        dropout=config.dropout_of_classes,
    )


def _head_units(config: EncoderConfig) -> tuple[Unit, tuple[Unit, ...]]:
    """The unit that returns the loss, and that which returns logits, if there are any."""
    loss = ("loss", "num_targets")
    if config.head == "masked":
        unit = Unit("head", ("hidden", "labels"), loss, optional=(LOSS_WEIGHTS,))
        return unit, (Unit("head", ("hidden",), ("logits",), method="logits"),)
    if config.head == "embedding":
        return Unit("head", ("hidden", "labels", DOCUMENTS), loss), ()
    of_documents = (DOCUMENTS,) if config.head == "sequences" and config.pooling == "mean" else ()
    unit = Unit("head", ("hidden", "labels", "positions", "keys"), loss, optional=of_documents)
    return unit, (Unit("head", ("hidden",), ("logits",), method="logits", optional=of_documents),)


def _planned(
    config: EncoderConfig, encoder: Encoder, inits: Inits, names: ExternalNames, of_embedding: tuple[str, ...]
) -> Model:
    """The model with its plan; `of_embedding` are the optional entries of the embedding."""
    takes = ("hidden", "positions", "keys")
    body = (
        Unit("embedding", ("tokens", "positions", "keys"), ("hidden",), optional=of_embedding),
        *(Unit(f"blocks.{name}", takes, ("hidden",), optional=(DOCUMENTS,)) for name in encoder.blocks),
    )
    of_loss, of_logits = _head_units(config)
    plan = describe(encoder, inits).plan(
        units=(*body, of_loss),
        inference=(*body, *of_logits) if of_logits else (),
        context={
            **dict.fromkeys(("tokens", "labels", LOSS_WEIGHTS, "positions", *of_embedding), AXES),
            **dict.fromkeys(("sample_ids", "keys"), ("batch",)),
            DOCUMENTS: ("batch", "documents"),
        },
        activations={"hidden": (*AXES, "embed"), "loss": (), "num_targets": (), "logits": (*AXES, "vocab")},
        external=names,
    )
    return Model(encoder, plan)
