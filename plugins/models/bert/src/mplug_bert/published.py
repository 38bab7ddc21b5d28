"""The config.json of BERT, RoBERTa and ModernBERT."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mplug_nn import (
    SHARED_FIELDS,
    FixedField,
    PublicField,
    PublicForm,
    ReadField,
    Values,
    attention_types,
    unused,
)

if TYPE_CHECKING:
    from mplug_bert.config import BertConfig, ModernBertConfig

PLAIN = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_python": "gelu"}
"""The library's activation -> model.activation."""
GATED = {
    "gelu": "geglu",
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu_new": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
}
"""The library's activation of the first half of a gated MLP -> model.activation."""
LAYERS = Values.integer(most=10_000)  # lists of blocks are made before the settings are checked


def _sizes(vocab: int, width: int, layers: int) -> dict[str, PublicField]:
    """The rows that all encoders have, with the library's defaults of the vocabulary, the MLP's width and depth."""
    return {
        **SHARED_FIELDS,
        "vocab_size": ReadField(vocab, Values.integer(), ("vocab_size",)),
        "hidden_size": ReadField(768, Values.integer(), ("hidden_size",)),
        "num_hidden_layers": ReadField(layers, LAYERS, ("num_layers",)),
        "num_attention_heads": ReadField(12, Values.integer(), ("num_attention_heads",)),
        "intermediate_size": ReadField(width, Values.integer(), ("ffn_hidden_size",)),
        "tie_word_embeddings": ReadField(True, Values.flag(), ("tie_embeddings",)),
        "initializer_range": ReadField(0.02, Values.not_negative(), ("init_std",), training=True),
        "is_decoder": FixedField(False, (False,), "attention is in both directions"),
    }


def _bert(vocab: int) -> dict[str, PublicField]:
    return {
        **_sizes(vocab, 3072, 12),
        "hidden_act": ReadField("gelu", Values.one_of(*PLAIN), ("activation",), PLAIN),
        "hidden_dropout_prob": ReadField(0.1, Values.share(), ("dropout",), training=True),
        "attention_probs_dropout_prob": ReadField(0.1, Values.share(), ("attention_dropout",), training=True),
        "max_position_embeddings": ReadField(512, Values.integer(), ("max_position_embeddings",)),
        "type_vocab_size": ReadField(2, Values.integer(), ("num_token_types",)),
        "layer_norm_eps": ReadField(1e-12, Values.positive(), ("norm_eps",)),
        "position_embedding_type": FixedField("absolute", ("absolute",), "positions are learned"),
        **unused(
            "a field of heads for other tasks",
            "directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head "
            "pooler_type",
        ),
    }


BERT = PublicForm(
    architecture="BertForMaskedLM",
    model_type="bert",
    fields=_bert(30522),
    implied={"position_offset": 0},
    longest="max_position_embeddings",
)


def _roberta(values: Mapping[str, Any]) -> dict[str, Any]:
    """The first position's row follows that of the padding token's number."""
    return {"position_offset": values["pad_token_id"] + 1}


def _written_roberta(config: "BertConfig") -> dict[str, Any]:
    return {"pad_token_id": config.position_offset - 1}


ROBERTA = PublicForm(
    architecture="RobertaForMaskedLM",
    model_type="roberta",
    fields={
        **_bert(50265),
        "hidden_act": FixedField("gelu", ("gelu",), "the library's head always uses it"),
        "pad_token_id": ReadField(1, Values.integer(0)),
    },
    settings=_roberta,
    write=_written_roberta,
    implied={"activation": "gelu"},
)
BERT_FORMS = (BERT, ROBERTA)


def _modern(values: Mapping[str, Any]) -> dict[str, Any]:
    every = values["global_attn_every_n_layers"]
    types = ["window" if number % every else "full" for number in range(values["num_hidden_layers"])]
    return {
        "window": values["local_attention"] // 2,
        "attention_types": attention_types(values, types),
        **_bases(values),
    }


BASES = {
    "full_attention": ("rope_theta", "global_rope_theta"),
    "sliding_attention": ("window_rope_theta", "local_rope_theta"),
}
"""Entry of `rope_parameters` -> our setting, and the field of older folders."""


def _bases(values: Mapping[str, Any]) -> dict[str, float]:
    """The bases of the rotary frequencies: those of `rope_parameters`, or else of older folders' own fields."""
    given = values["rope_parameters"] or {}
    for name in given:
        if name not in BASES:
            raise ValueError(f"its field 'rope_parameters.{name}' is unknown; it has the blocks' types of attention")
    found = {}
    for name, (setting, older) in BASES.items():
        options = given.get(name)
        if not isinstance(options, dict | None):
            raise ValueError(f"its field 'rope_parameters.{name}' is {options!r}, but must be a mapping, or null")
        found[setting] = _base(f"rope_parameters.{name}", options or {}, values[older])
    return found


def _base(where: str, options: Mapping[str, Any], otherwise: float) -> float:
    """The base of one mapping; a scaling is refused."""
    for name, value in options.items():
        if name in ("rope_type", "type"):
            problem = FixedField("default", ("default",), "the family scales no rotary positions").check(
                f"{where}.{name}", value
            )
        elif name == "rope_theta":
            problem = ReadField(None, Values.positive()).check(f"{where}.{name}", value)
        elif name == "partial_rotary_factor":
            problem = FixedField(1.0, (None, 1.0), "the library ignores it").check(f"{where}.{name}", value)
        else:
            problem = f"its field '{where}.{name}' is unknown for rotary positions of the type 'default'"
        if problem is not None:
            raise ValueError(problem)
    base: float = options.get("rope_theta", otherwise)
    return base


def _written_modern(config: "ModernBertConfig") -> dict[str, Any]:
    bases = {"full_attention": config.rope_theta, "sliding_attention": config.window_rope_theta}
    kinds = ["sliding_attention" if config.has_window(n) else "full_attention" for n in range(config.num_layers)]
    return {
        "local_attention": 2 * config.window or 1,
        "layer_types": kinds,
        "rope_parameters": {name: {"rope_type": "default", "rope_theta": base} for name, base in bases.items()},
        "global_rope_theta": config.rope_theta,
        "local_rope_theta": config.window_rope_theta,
    }


MODERN_BERT = PublicForm(
    architecture="ModernBertForMaskedLM",
    model_type="modernbert",
    fields={
        **_sizes(50368, 1152, 22),
        "hidden_activation": ReadField("gelu", Values.one_of(*GATED), ("activation",), GATED),
        "norm_eps": ReadField(1e-5, Values.positive(), ("norm_eps",)),
        "norm_bias": ReadField(False, Values.flag(), ("norm_bias",)),
        "attention_bias": ReadField(False, Values.flag(), ("attention_bias",)),
        "mlp_bias": ReadField(False, Values.flag(), ("mlp_bias",)),
        "decoder_bias": ReadField(True, Values.flag(), ("output_bias",)),
        "classifier_bias": ReadField(False, Values.flag(), ("head_bias",)),
        "classifier_activation": ReadField("gelu", Values.one_of(*PLAIN), ("head_activation",), PLAIN),
        "embedding_dropout": ReadField(0.0, Values.share(), ("dropout",), training=True),
        "attention_dropout": FixedField(0.0, (0.0,), "the library drops the output of attention by it too"),
        "mlp_dropout": FixedField(0.0, (0.0,), "the family has no dropout inside of an MLP"),
        "max_position_embeddings": ReadField(8192, Values.integer()),
        "local_attention": ReadField(128, Values.integer()),
        "layer_types": ReadField(None, Values.names().or_null),
        "global_attn_every_n_layers": ReadField(3, Values.integer()),
        "rope_parameters": ReadField(None, Values.mapping().or_null),
        "global_rope_theta": ReadField(160000.0, Values.positive()),
        "local_rope_theta": ReadField(10000.0, Values.positive()),
        "rope_scaling": FixedField(None, (None,), "the family scales no rotary positions"),
        **unused("only the start of training from scratch uses it", "initializer_cutoff_factor"),
        **unused("a field of classifiers", "classifier_pooling"),
        **unused(
            "how the library runs the same computation",
            "deterministic_flash_attn sparse_prediction sparse_pred_ignore_index reference_compile "
            "repad_logits_with_grad",
        ),
        **unused("released folders have it, and the library ignores it", "layer_norm_eps position_embedding_type"),
    },
    settings=_modern,
    write=_written_modern,
    training={"attention_dropout": 0.0},
    longest="max_position_embeddings",
)
MODERN_BERT_FORMS = (MODERN_BERT,)
