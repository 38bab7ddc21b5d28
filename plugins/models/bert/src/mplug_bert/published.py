"""The config.json of BERT, RoBERTa and ModernBERT."""

from collections.abc import Mapping
from dataclasses import replace
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


OTHER_HEADS: dict[str, Any] = {"head": "masked", "labels": (), "pooling": "first"}
"""A folder with a head of masked tokens: a run may replace the head."""
OF_HEADS: dict[str, Any] = {"temperature": 0.05, "classifier_dropout": None}
"""Settings of other heads."""


def _labels(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the classes, in the order of their numbers."""
    named = values["id2label"]
    if named is None:
        return tuple(f"LABEL_{number}" for number in range(values["num_labels"] or 2))
    numbered = {str(number): name for number, name in named.items()}
    names = [numbered.get(str(number)) for number in range(len(numbered))]
    if len(numbered) < 2 or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise ValueError("its field 'id2label' must map the numbers from 0 on to different names of at least 2 classes")
    if values["num_labels"] not in (None, len(names)):
        raise ValueError(f"its field 'num_labels' is {values['num_labels']}, and 'id2label' has {len(names)} classes")
    return tuple(str(name) for name in names)


def _with_classes(form: PublicForm, architecture: str, head: str, **more: PublicField) -> PublicForm:
    """The form of the same model with a head for classes."""

    def settings(values: Mapping[str, Any]) -> dict[str, Any]:
        return {**form.settings(values), "labels": _labels(values)}

    def write(config: "BertConfig | ModernBertConfig") -> dict[str, Any]:
        names = {str(number): name for number, name in enumerate(config.labels)}
        return {**form.write(config), "id2label": names, "label2id": {name: int(n) for n, name in names.items()}}

    changed = replace(
        form,
        architecture=architecture,
        settings=settings,
        write=write,
        implied={**({} if "classifier_pooling" in more else {"pooling": "first"}), **form.implied, "head": head},
        training={name: value for name, value in form.training.items() if name != "classifier_dropout"},
        altering={},
    )
    rows: dict[str, PublicField] = {
        "id2label": ReadField(None, Values.mapping().or_null),
        "num_labels": ReadField(None, Values.integer(2).or_null),
        "problem_type": FixedField(None, (None, "single_label_classification"), "a class is one of several"),
        "classifier_dropout": ReadField(None, Values.share().or_null, ("classifier_dropout",), training=True),
    }
    return changed.with_fields(**{**rows, **more})


BERT = PublicForm(
    architecture="BertForMaskedLM",
    model_type="bert",
    fields=_bert(30522),
    implied={"position_offset": 0},
    training=OF_HEADS,
    altering=OTHER_HEADS,
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
    training=OF_HEADS,
    altering=OTHER_HEADS,
)
ROBERTA_WITH_CLASSES = ROBERTA.with_fields(hidden_act=_bert(50265)["hidden_act"])
ROBERTA_WITH_CLASSES = replace(ROBERTA_WITH_CLASSES, implied={})
BERT_FORMS = (
    BERT,
    ROBERTA,
    _with_classes(BERT, "BertForSequenceClassification", "sequences"),
    _with_classes(BERT, "BertForTokenClassification", "tokens"),
    _with_classes(ROBERTA_WITH_CLASSES, "RobertaForSequenceClassification", "sequences"),
    _with_classes(ROBERTA_WITH_CLASSES, "RobertaForTokenClassification", "tokens"),
)


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
    training={"attention_dropout": 0.0, **OF_HEADS},
    altering=OTHER_HEADS,
    longest="max_position_embeddings",
)
POOLINGS = {"cls": "first", "mean": "mean"}
MODERN_DROPOUT = ReadField(0.0, Values.share(), ("classifier_dropout",), training=True)
MODERN_BERT_FORMS = (
    MODERN_BERT,
    _with_classes(
        MODERN_BERT,
        "ModernBertForSequenceClassification",
        "sequences",
        classifier_dropout=MODERN_DROPOUT,
        classifier_pooling=ReadField("cls", Values.one_of(*POOLINGS), ("pooling",), POOLINGS),
    ),
    _with_classes(MODERN_BERT, "ModernBertForTokenClassification", "tokens", classifier_dropout=MODERN_DROPOUT),
)
