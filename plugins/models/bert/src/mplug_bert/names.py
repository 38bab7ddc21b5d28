"""The names of the tensors of published BERT, RoBERTa and ModernBERT. No torch."""

from typing import TYPE_CHECKING

from mplug import ExternalNames, Fused

if TYPE_CHECKING:
    from mplug_bert.config import BertConfig, ModernBertConfig

KINDS = ("weight", "bias")


def bert_names(config: "BertConfig") -> ExternalNames:
    """Those of BERT; those of RoBERTa if positions have an offset, because only RoBERTa's have one.

    Both have two names for the bias of the logits: the first counts if the projection is tied, else the second.
    """
    is_roberta = config.position_offset > 0
    model = "roberta" if is_roberta else "bert"
    transform = ("lm_head.dense", "lm_head.layer_norm") if is_roberta else _TRANSFORM
    output = "lm_head" if is_roberta else "cls.predictions"
    bias, copy = f"{output}.bias", f"{output}.decoder.bias"
    if not config.tie_embeddings:
        bias, copy = copy, bias
    modules = {"embedding.norm": f"{model}.embeddings.LayerNorm"}
    modules |= {f"blocks.*.{ours}": f"{model}.encoder.layer.*.{theirs}" for ours, theirs in _BLOCK.items()}
    modules |= dict(zip(("head.dense", "head.dense_norm"), transform, strict=True))
    at = f"{model}.encoder.layer.*.attention.self"
    tables = {"token": "word_embeddings", "position": "position_embeddings", "token_type": "token_type_embeddings"}
    return ExternalNames(
        {
            **{f"embedding.{ours}.weight": f"{model}.embeddings.{theirs}.weight" for ours, theirs in tables.items()},
            **{f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in KINDS},
            **{
                f"blocks.*.attn.qkv.{kind}": Fused(*(f"{at}.{one}.{kind}" for one in ("query", "key", "value")))
                for kind in KINDS
            },
            "head.project.weight": f"{output}.decoder.weight",
            "head.project.bias": bias,
        },
        prefix=f"{model}.",
        ignored=(
            *(f"{model}.embeddings.position_ids", f"{model}.pooler", "cls.seq_relationship"),
            *(() if config.tie_embeddings else (copy,)),
        ),
        copies={copy: "head.project.bias"} if config.tie_embeddings else {},
        endings={".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"},
    )


_TRANSFORM = ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm")
_BLOCK = {
    "attn.out": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "norm2": "output.LayerNorm",
}


def modernbert_names(config: "ModernBertConfig") -> ExternalNames:
    """Those of ModernBERT; the first block has no norm before attention."""
    layer = "model.layers.*"
    linears = {
        "attn.qkv": ("attn.Wqkv", config.attention_bias),
        "attn.out": ("attn.Wo", config.attention_bias),
        "mlp.up": ("mlp.Wi", config.mlp_bias),
        "mlp.down": ("mlp.Wo", config.mlp_bias),
        **({"norm1": ("attn_norm", config.norm_bias)} if config.num_layers > 1 else {}),
        "norm2": ("mlp_norm", config.norm_bias),
    }
    modules = {f"blocks.*.{ours}": (f"{layer}.{theirs}", bias) for ours, (theirs, bias) in linears.items()}
    modules |= {
        "embedding.norm": ("model.embeddings.norm", config.norm_bias),
        "head.norm": ("model.final_norm", config.norm_bias),
        "head.dense": ("head.dense", config.head_bias),
        "head.dense_norm": ("head.norm", config.norm_bias),
        "head.project": ("decoder", config.output_bias),
    }
    return ExternalNames(
        {
            "embedding.token.weight": "model.embeddings.tok_embeddings.weight",
            **{
                f"{ours}.{kind}": f"{theirs}.{kind}"
                for ours, (theirs, bias) in modules.items()
                for kind in (KINDS if bias else KINDS[:1])
            },
        },
        prefix="model.",
    )
