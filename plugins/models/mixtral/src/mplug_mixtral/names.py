"""The names of Mixtral's tensors."""

from mplug_nn import SparseDecoderConfig
from mplug_pretrained import ExternalNames, Fused


def names(config: SparseDecoderConfig) -> ExternalNames:
    """Where Mixtral keeps the parameters: one tensor for each matrix of each expert."""
    block = "model.layers.*"
    attention, experts = f"{block}.self_attn", f"{block}.block_sparse_moe.experts.{{}}"
    states = {"blocks.*.moe.router.last_load": None} if config.moe_balance == "global_batch" else {}
    return ExternalNames(
        {
            "embedding.token.weight": "model.embed_tokens.weight",
            "blocks.*.norm1.weight": f"{block}.input_layernorm.weight",
            "blocks.*.attn.qkv.weight": Fused(*(f"{attention}.{one}_proj.weight" for one in "qkv")),
            "blocks.*.attn.out.weight": f"{attention}.o_proj.weight",
            "blocks.*.norm2.weight": f"{block}.post_attention_layernorm.weight",
            "blocks.*.moe.router.weight": f"{block}.block_sparse_moe.gate.weight",
            "blocks.*.moe.experts.up": Fused(f"{experts}.w1.weight", f"{experts}.w3.weight"),
            "blocks.*.moe.experts.down": f"{experts}.w2.weight",
            "head.norm.weight": "model.norm.weight",
            "head.project.weight": "lm_head.weight",
            **states,
        },
        prefix="model.",
    )
