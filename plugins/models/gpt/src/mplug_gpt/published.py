"""GPT-2's published form: its config.json and the names of its tensors (Radford et al. 2019)."""

from typing import TYPE_CHECKING, Any

from mplug import PublicConfig, PublicSettings

if TYPE_CHECKING:
    from mplug_gpt.config import GPTConfig

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""`activation_function` of GPT-2 -> model.activation."""


def settings_of(config: PublicConfig) -> PublicSettings:
    """The settings of a GPT-2."""
    config.expect("scale_attn_weights", True)
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        config.expect(name, False)
    config.ignore("n_ctx", "reorder_and_upcast_attn", "embd_pdrop")
    for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout"):
        config.ignore(f"summary_{name}")
    width, positions = config.number("n_embd"), config.number("n_positions")
    fixed = {
        "hidden_size": width,
        "num_layers": config.number("n_layer"),
        "num_attention_heads": config.number("n_head"),
        "vocab_size": config.number("vocab_size"),
        "ffn_hidden_size": config.number("n_inner", 4 * width),
        "max_position_embeddings": positions,
        "position": "learned",
        "activation": ACTIVATIONS[config.expect("activation_function", *ACTIVATIONS)],
        "norm_eps": config.take("layer_norm_epsilon", 1e-5),
        "tie_embeddings": config.expect("tie_word_embeddings", True, False),
        "bias": True,
    }
    free = {
        "dropout": config.take("resid_pdrop", 0.1),
        "attention_dropout": config.take("attn_pdrop", 0.1),
        "init_std": config.take("initializer_range", 0.02),
    }
    return PublicSettings(fixed, free, positions)


def config_of(config: "GPTConfig") -> dict[str, Any]:
    """The config.json of a model."""
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    if config.activation not in names:
        raise ValueError(f"GPT-2 has no activation '{config.activation}'")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_attention_heads,
        "n_inner": config.ffn_width,
        "n_positions": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "activation_function": names[config.activation],
        "layer_norm_epsilon": config.norm_eps,
        "initializer_range": config.init_std,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        "tie_word_embeddings": config.tie_embeddings,
    }
