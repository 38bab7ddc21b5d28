"""From the config to T5 on the meta device, and its plan."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mplug import LOSS_WEIGHTS, Answering, Init, Inits, Model, Parameter, Stream, Unit, describe
from mplug_nn import MLP, Attention, CrossAttention, CrossKeys, Embedding, Norm, RelativeBias
from mplug_t5.blocks import (
    Decoder,
    DecoderBlock,
    DecoderEmbedding,
    Encoder,
    EncoderBlock,
    EncoderDecoder,
    EncoderEmbedding,
    EncoderEnd,
    T5Head,
)
from mplug_t5.config import T5Config
from mplug_t5.names import names

ROWS = "encoder_tokens"
"""The axis of the stream; also the entry with its tokens."""
PLACES, LENGTHS, OF_SAMPLE = "encoder_places", "encoder_lengths", "encoder_rows"
OF_TEXT = "encoder_own_rows"
"""The rows of each text of this rank, then -1: attention can compute a text at a time."""
AXES = ("batch", "sequence")
REMEDY = "use a data plugin with texts for the encoder (--data spans or --data pairs)"


def build(config: T5Config) -> Model:
    """The model on the meta device, and its plan."""
    size, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim

    def norm() -> Norm:
        return Norm(size, "rmsnorm", config.norm_eps)

    def attention(*, causal: bool) -> Attention:
        own = {"bias": False, "qk_norm": False, "theta": None, "attention_bias": "relative", "scale": 1.0}
        return Attention(size, heads, heads, width, **own, causal=causal, documents=not causal)  # type: ignore[arg-type]

    def mlp() -> MLP:
        return MLP(size, config.ffn_hidden_size, config.activation, bias=False)

    def relative(*, causal: bool) -> RelativeBias:
        return RelativeBias(heads, config.bias_ranges, config.bias_reach, causal=causal)

    def token() -> Embedding:
        return Embedding(config.vocab_size, size)

    dropout = config.dropout
    encoder = Encoder(
        EncoderEmbedding(token(), relative(causal=False), dropout),
        [EncoderBlock(norm(), attention(causal=False), norm(), mlp(), dropout) for _ in range(config.num_layers)],
        EncoderEnd(norm(), dropout),
    )
    layers = range(config.decoder_layers)
    decoder = Decoder(
        DecoderEmbedding(token(), relative(causal=True), dropout),
        [CrossKeys(size, heads, width) for _ in layers],
        [
            DecoderBlock(
                (norm(), norm(), norm()),
                attention(causal=True),
                CrossAttention(size, heads, width, typical_keys=config.encoder_length, scale=1.0),
                mlp(),
                dropout,
            )
            for _ in layers
        ],
    )
    scale = size**-0.5 if config.scales_output else 1.0
    head = T5Head(norm(), size, config.vocab_size, scale, dropout)
    return _planned(EncoderDecoder(encoder, decoder, head, tied=config.tie_embeddings), config)


def _planned(model: EncoderDecoder, config: T5Config) -> Model:
    of_rows, length = ("packs", ROWS), config.encoder_length
    body = tuple(_units(model))
    plan = describe(model, Inits.normal(1.0, 1.0)).plan(
        units=(
            *body,
            Unit(
                "head",
                ("hidden", "labels", "positions", "keys"),
                ("loss", "num_targets"),
                optional=(LOSS_WEIGHTS,),
            ),
        ),
        inference=(*body, Unit("head", ("hidden",), ("logits",), method="logits")),
        context={
            **dict.fromkeys(("tokens", "labels", LOSS_WEIGHTS, "positions"), AXES),
            **dict.fromkeys(("sample_ids", "keys"), ("batch",)),
            **dict.fromkeys((ROWS, PLACES), of_rows),
            LENGTHS: ("packs", "encoder_texts"),
            OF_SAMPLE: ("batch", "encoder_length"),
            OF_TEXT: ("encoder_texts", "encoder_length"),
        },
        activations={
            "encoder_hidden": (*of_rows, "embed"),
            "encoder_bias": ("heads", "distances"),
            "encoded": (*of_rows, "embed"),
            "memory": (*of_rows, "keys_and_values"),
            "hidden": (*AXES, "embed"),
            "bias": ("heads", "distances"),
            "loss": (),
            "num_targets": (),
            "logits": (*AXES, "vocab"),
        },
        streams={ROWS: Stream((LENGTHS,), 1, (OF_SAMPLE,), (OF_TEXT,), length, length**2, REMEDY)},
        external=names(config),
        answering=Answering(config.start_token, tuple(_later_units(body))),
    )
    return Model(model, replace(plan, parameters=_with_inits(plan.parameters, config)))


def _units(model: EncoderDecoder) -> list[Unit]:
    """The units of the encoder, then those of the decoder, before the head."""
    hidden, stream = ("encoder_hidden",), {"sequence": ROWS}
    units = [Unit("encoder.embedding", (ROWS, PLACES), (*hidden, "encoder_bias"), **stream)]
    units += [
        Unit(
            f"encoder.blocks.{number}",
            (*hidden, "encoder_bias", PLACES, LENGTHS),
            hidden,
            optional=(OF_TEXT,),
            **stream,
        )
        for number in model.encoder.blocks
    ]
    units.append(Unit("encoder.end", (*hidden, PLACES), ("encoded",), **stream))
    units.append(Unit("decoder.embedding", ("tokens", "positions", "keys"), ("hidden", "bias")))
    for number in model.decoder.blocks:
        units.append(Unit(f"decoder.memories.{number}", ("encoded",), ("memory",), **stream))
        takes = ("hidden", "bias", "memory", OF_SAMPLE, "positions", "keys")
        units.append(Unit(f"decoder.blocks.{number}", takes, ("hidden",)))
    return units


def _later_units(body: tuple[Unit, ...]) -> Iterator[Unit]:
    """The units that compute later tokens while the model samples."""
    for unit in (unit for unit in body if unit.sequence != ROWS):
        is_block = OF_SAMPLE in unit.inputs
        inputs = tuple(name for name in unit.inputs if name not in ("memory", OF_SAMPLE))
        yield replace(unit, inputs=inputs, method="continued") if is_block else unit
    yield Unit("head", ("hidden",), ("logits",), method="logits")


def _with_inits(parameters: Mapping[str, Parameter], config: T5Config) -> dict[str, Parameter]:
    """The parameters with their initial values (arXiv 1910.10683, section 3.1.1, and the authors' code).

    The projection of queries is narrower by the factor that attention lacks. An untied projection to the vocabulary
    begins with logits of the size that those of a tied one have.
    """
    width, heads, head = config.hidden_size**-0.5, config.num_attention_heads * config.head_dim, config.head_dim**-0.5
    stds: dict[str, float | tuple[float, ...]] = {
        "token.weight": 1.0,
        "relative.weight": width,
        "attn.qkv.weight": (width * head, width, width),
        "cross.q.weight": width * head,
        "kv.weight": width,
        "attn.out.weight": heads**-0.5,
        "cross.out.weight": heads**-0.5,
        "mlp.up.weight": width,
        "mlp.down.weight": config.ffn_hidden_size**-0.5,
        "head.project.weight": width,
    }
    made = dict(parameters)
    for name, parameter in parameters.items():
        std = next((std for end, std in stds.items() if name.endswith(end)), None)
        if isinstance(std, tuple):
            own = Init("normal", segment_stds=tuple(config.init_factor * one for one in std))
            made[name] = replace(parameter, init=own)
        elif std is not None:
            made[name] = replace(parameter, init=Init("normal", std=config.init_factor * std))
    return made
