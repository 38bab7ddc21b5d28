"""The names of the tensors of published BERT, RoBERTa and ModernBERT. No torch."""

from typing import TYPE_CHECKING

from mplug_pretrained import ExternalNames, Fused

if TYPE_CHECKING:
    from mplug_bert.config import BertConfig, ModernBertConfig

KINDS = ("weight", "bias")


def bert_names(config: "BertConfig") -> ExternalNames:
    """Those of BERT; those of RoBERTa if positions have an offset, because only RoBERTa's have one."""
    model = "roberta" if config.is_roberta else "bert"
    modules = {"embedding.norm": f"{model}.embeddings.LayerNorm"}
    modules |= {f"blocks.*.{ours}": f"{model}.encoder.layer.*.{theirs}" for ours, theirs in _BLOCK.items()}
    at = f"{model}.encoder.layer.*.attention.self"
    tables = {"token": "word_embeddings", "position": "position_embeddings", "token_type": "token_type_embeddings"}
    head, copies, unused = _masked_head(config) if config.head == "masked" else _class_head(config)
    return ExternalNames(
        {
            **{f"embedding.{ours}.weight": f"{model}.embeddings.{theirs}.weight" for ours, theirs in tables.items()},
            **{f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in KINDS},
            **{
                f"blocks.*.attn.qkv.{kind}": Fused(*(f"{at}.{one}.{kind}" for one in ("query", "key", "value")))
                for kind in KINDS
            },
            **head,
        },
        prefix=f"{model}.",
        ignored=(f"{model}.embeddings.position_ids", *unused),
        copies=copies,
        endings={".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"},
    )


Names = tuple[dict[str, str], dict[str, str], tuple[str, ...]]
"""Our names -> theirs; names of copies; names of tensors of other heads."""


def _masked_head(config: "BertConfig") -> Names:
    """The bias of the logits has two names: the first counts if the projection is tied, else the second."""
    transform = ("lm_head.dense", "lm_head.layer_norm") if config.is_roberta else _TRANSFORM
    output = "lm_head" if config.is_roberta else "cls.predictions"
    bias, copy = f"{output}.bias", f"{output}.decoder.bias"
    if not config.tie_embeddings:
        bias, copy = copy, bias
    modules = dict(zip(("head.dense", "head.dense_norm"), transform, strict=True))
    names = {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in KINDS}
    names |= {"head.project.weight": f"{output}.decoder.weight", "head.project.bias": bias}
    unused = (f"{'roberta' if config.is_roberta else 'bert'}.pooler", "cls.seq_relationship")
    if config.tie_embeddings:
        return names, {copy: "head.project.bias"}, unused
    return names, {}, (*unused, copy)


def _class_head(config: "BertConfig") -> Names:
    """Of the heads for classes; that for embeddings has no parameters."""
    unused: tuple[str, ...] = ("lm_head", "roberta.pooler") if config.is_roberta else ("cls",)
    modules = {}
    if config.head == "tokens":
        modules = {"head.project": "classifier"}
    elif config.head == "sequences" and config.is_roberta:
        modules = {"head.dense": "classifier.dense", "head.project": "classifier.out_proj"}
    elif config.head == "sequences":
        modules = {"head.dense": "bert.pooler.dense", "head.project": "classifier"}
    if not config.is_roberta and config.head != "sequences":
        unused = (*unused, "bert.pooler")
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in KINDS}, {}, unused


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
    }
    if config.head != "embedding":
        is_masked = config.head == "masked"
        modules |= {
            "head.dense": ("head.dense", config.head_bias),
            "head.dense_norm": ("head.norm", config.norm_bias),
            "head.project": ("decoder", config.output_bias) if is_masked else ("classifier", True),
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
        ignored={"masked": (), "embedding": ("head", "decoder")}.get(config.head, ("decoder",)),
    )
