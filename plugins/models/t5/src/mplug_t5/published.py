"""The config.json of T5, T5 v1.1 and FLAN-T5."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mplug_nn import SHARED_FIELDS, FixedField, PublicForm, ReadField, Values, unused

if TYPE_CHECKING:
    from mplug_t5.config import T5Config

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gated-gelu": "geglu_tanh",
    "gated-gelu_new": "geglu_tanh",
    "gated-silu": "swiglu",
}
"""The library's `feed_forward_proj` -> model.activation. Its 'gated-gelu' is by tanh."""
LAYERS = Values.integer(most=10_000)  # lists of blocks are made before the settings are checked


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    scaled = values["scale_decoder_outputs"]
    return {
        "num_decoder_layers": values["num_decoder_layers"] or values["num_layers"],
        "start_token": _start(values),
        "scale_output": values["tie_word_embeddings"] if scaled is None else scaled,
    }


def _start(values: Mapping[str, Any]) -> int:
    """The decoder's first token: the library takes the padding if a folder names none."""
    start, padding = values["decoder_start_token_id"], values["pad_token_id"]
    found: int = (padding or 0) if start is None else start
    return found


def _written(config: "T5Config") -> dict[str, Any]:
    return {
        "num_decoder_layers": config.decoder_layers,
        "scale_decoder_outputs": config.scales_output,
        "decoder_start_token_id": config.start_token,
    }


T5_FORM = PublicForm(
    architecture="T5ForConditionalGeneration",
    model_type="t5",
    fields={
        **SHARED_FIELDS,
        "vocab_size": ReadField(32128, Values.integer(), ("vocab_size",)),
        "d_model": ReadField(512, Values.integer(), ("hidden_size",)),
        "d_kv": ReadField(64, Values.integer(), ("head_dim",)),
        "d_ff": ReadField(2048, Values.integer(), ("ffn_hidden_size",)),
        "num_layers": ReadField(6, LAYERS, ("num_layers",)),
        "num_decoder_layers": ReadField(None, LAYERS.or_null),
        "num_heads": ReadField(8, Values.integer(), ("num_attention_heads",)),
        "relative_attention_num_buckets": ReadField(32, Values.integer(), ("bias_ranges",)),
        "relative_attention_max_distance": ReadField(128, Values.integer(), ("bias_reach",)),
        "layer_norm_epsilon": ReadField(1e-6, Values.positive(), ("norm_eps",)),
        "feed_forward_proj": ReadField("relu", Values.one_of(*ACTIVATIONS), ("activation",), ACTIVATIONS),
        "tie_word_embeddings": ReadField(True, Values.flag(), ("tie_embeddings",)),
        "scale_decoder_outputs": ReadField(None, Values.flag().or_null),
        "dropout_rate": ReadField(0.1, Values.share(), ("dropout",), training=True),
        "initializer_factor": ReadField(1.0, Values.not_negative(), ("init_factor",), training=True),
        "pad_token_id": ReadField(0, Values.integer(0).or_null),
        "decoder_start_token_id": ReadField(None, Values.integer(0).or_null),
        "is_encoder_decoder": FixedField(True, (True,), "the family has both stacks"),
        "is_decoder": FixedField(False, (False,), "the family has both stacks"),
        **unused("other fields decide it", "dense_act_fn is_gated_act"),
        **unused("the length of the texts that the authors trained with", "n_positions"),
        **unused("whether decoding keeps keys and values", "output_past"),
        **unused("a field of classifiers", "classifier_dropout"),
    },
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
    settings=_settings,
    write=_written,
)
FORMS = (T5_FORM,)
