"""GPT-2's published form: its config.json and the names of its tensors (Radford et al. 2019)."""

from typing import TYPE_CHECKING, Any

from mplug import ExternalNames, PublicConfig, PublicSettings, Transposed

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


def difference(config: "GPTConfig") -> str:
    """Why a model is no GPT-2; the empty string if it is one."""
    needed = {
        "position": "learned",
        "norm": "layernorm",
        "bias": True,
        "qk_norm": False,
        "kv_heads": config.num_attention_heads,
        "head_width": config.hidden_size / config.num_attention_heads,
    }
    own = {name: getattr(config, name) for name in needed}
    wrong = [f"{name}={value}" for name, value in own.items() if value != needed[name]]
    wrong += ["activation=swiglu"] if config.activation == "swiglu" else []
    return f"GPT-2 has no {', '.join(wrong)}" if wrong else ""


def config_of(config: "GPTConfig") -> dict[str, Any]:
    """The config.json of a model; ValueError if it is no GPT-2."""
    if reason := difference(config):
        raise ValueError(reason)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_attention_heads,
        "n_inner": config.ffn_width,
        "n_positions": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "activation_function": "gelu" if config.activation == "gelu" else "gelu_new",
        "layer_norm_epsilon": config.norm_eps,
        "initializer_range": config.init_std,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        "tie_word_embeddings": config.tie_embeddings,
    }


def names() -> ExternalNames:
    """Where GPT-2 keeps the parameters. Its matrices are [in, out]."""
    block = "transformer.h.*"
    matrices = {
        "attn.qkv": "attn.c_attn",
        "attn.out": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    vectors = {"norm1": "ln_1", "norm2": "ln_2", **matrices}
    return ExternalNames(
        {
            "embedding.token.weight": "transformer.wte.weight",
            "embedding.position.weight": "transformer.wpe.weight",
            **{f"blocks.*.{ours}.weight": Transposed(f"{block}.{theirs}.weight") for ours, theirs in matrices.items()},
            **{f"blocks.*.{norm}.weight": f"{block}.{vectors[norm]}.weight" for norm in ("norm1", "norm2")},
            **{f"blocks.*.{ours}.bias": f"{block}.{theirs}.bias" for ours, theirs in vectors.items()},
            "head.norm.weight": "transformer.ln_f.weight",
            "head.norm.bias": "transformer.ln_f.bias",
            "head.project.weight": "lm_head.weight",
        },
        prefix="transformer.",
        ignored=(f"{block}.attn.bias", f"{block}.attn.masked_bias"),  # causal masks of older releases
    )
