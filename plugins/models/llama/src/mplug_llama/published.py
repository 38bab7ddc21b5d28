"""The config.json of Llama."""

from typing import TYPE_CHECKING, Any

from mplug_nn import (
    EXPERTS_ALTERING,
    EXPERTS_TRAINING,
    SLICES_FIELDS,
    PublicForm,
    ReadField,
    Values,
    decoder_fields,
    heads_fields,
    rotary_fields,
    rotary_settings,
    tied_fields,
    written_heads,
    written_rotary,
)

if TYPE_CHECKING:
    from mplug_llama.config import LlamaConfig


def _written(config: "LlamaConfig") -> dict[str, Any]:
    return {**written_heads(config), **written_rotary(config.rope_theta, config.rope_scaling)}


LLAMA = PublicForm(
    architecture="LlamaForCausalLM",
    model_type="llama",
    fields={
        **decoder_fields(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=2048,
        ),
        **heads_fields(None, None, null=("num_key_value_heads", "head_dim")),
        **rotary_fields(),
        **tied_fields(False),
        **SLICES_FIELDS,
        "attention_bias": ReadField(False, Values.flag(), ("qkv_bias", "attention_out_bias")),
        "mlp_bias": ReadField(False, Values.flag(), ("mlp_bias",)),
    },
    settings=rotary_settings,
    write=_written,
    training=EXPERTS_TRAINING,
    altering=EXPERTS_ALTERING,
    longest="max_position_embeddings",
)
"""Llama 2 and 3."""
FORMS = (LLAMA,)
