"""GPT-2's config.json (Radford et al. 2019)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mplug_nn import SHARED_FIELDS, FixedField, PublicForm, ReadField, UnusedField, Values, unused

if TYPE_CHECKING:
    from mplug_gpt.config import GPTConfig

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""`activation_function` of GPT-2 -> model.activation."""


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    width = values["n_inner"]
    return {"ffn_hidden_size": 4 * values["n_embd"] if width is None else width}


def _written(config: "GPTConfig") -> dict[str, Any]:
    return {"n_inner": config.ffn_width, "embd_pdrop": config.dropout}


GPT2 = PublicForm(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    fields={
        **SHARED_FIELDS,
        "vocab_size": ReadField(50257, Values.integer(), ("vocab_size",)),
        "n_positions": ReadField(1024, Values.integer(), ("max_position_embeddings",)),
        "n_embd": ReadField(768, Values.integer(), ("hidden_size",)),
        "n_layer": ReadField(12, Values.integer(), ("num_layers",)),
        "n_head": ReadField(12, Values.integer(), ("num_attention_heads",)),
        "n_inner": ReadField(None, Values.integer().or_null),
        "activation_function": ReadField("gelu_new", Values.one_of(*ACTIVATIONS), ("activation",), ACTIVATIONS),
        "layer_norm_epsilon": ReadField(1e-5, Values.positive(), ("norm_eps",)),
        "tie_word_embeddings": ReadField(True, Values.flag(), ("tie_embeddings",)),
        "scale_attn_weights": FixedField(True, (True,)),
        "scale_attn_by_inverse_layer_idx": FixedField(False, (False,)),
        "reorder_and_upcast_attn": UnusedField("the same attention, with scores in fp32"),
        "resid_pdrop": ReadField(0.1, Values.share(), ("dropout",), training=True),
        "attn_pdrop": ReadField(0.1, Values.share(), ("attention_dropout",), training=True),
        "embd_pdrop": UnusedField("only training drops, and model.dropout is one rate for all, by resid_pdrop"),
        "initializer_range": ReadField(0.02, Values.not_negative(), ("init_std",), training=True),
        **unused("the causal mask of older releases had this length", "n_ctx"),
        **unused(
            "a field of heads for other tasks",
            "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout",
        ),
    },
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    settings=_settings,
    write=_written,
    implied={"position": "learned", "bias": True},
    longest="n_positions",
)
FORMS = (GPT2,)
