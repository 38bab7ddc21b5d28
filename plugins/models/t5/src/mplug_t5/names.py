"""The names of the tensors of published T5. No torch."""

from typing import TYPE_CHECKING, Any

from mplug_pretrained import ExternalNames, Fused

if TYPE_CHECKING:
    from mplug_t5.config import T5Config


def names(config: "T5Config") -> ExternalNames:
    """Those of the library. The tables of both biases stand in the first blocks."""
    from mplug_nn.open_lists import ACTIVATIONS  # names only

    gated = ACTIVATIONS.load(config.activation).gated
    encoder, decoder = "encoder.block.*.layer", "decoder.block.*.layer"
    tensors: dict[str, Any] = {
        "encoder.embedding.token.weight": "shared.weight",
        "encoder.end.norm.weight": "encoder.final_layer_norm.weight",
        "head.norm.weight": "decoder.final_layer_norm.weight",
    }
    if not config.tie_embeddings:
        tensors["head.project.weight"] = "lm_head.weight"
    for stack, at, last in (("encoder", encoder, 1), ("decoder", decoder, 2)):
        own = f"{at}.0.SelfAttention"
        tensors |= {
            f"{stack}.embedding.relative.weight": (
                f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            ),
            f"{stack}.blocks.*.norm1.weight": f"{at}.0.layer_norm.weight",
            f"{stack}.blocks.*.attn.qkv.weight": Fused(*(f"{own}.{one}.weight" for one in "qkv")),
            f"{stack}.blocks.*.attn.out.weight": f"{own}.o.weight",
            f"{stack}.blocks.*.norm2.weight": f"{at}.{last}.layer_norm.weight",
            f"{stack}.blocks.*.mlp.down.weight": f"{at}.{last}.DenseReluDense.wo.weight",
        }
        up = f"{at}.{last}.DenseReluDense.wi"
        tensors[f"{stack}.blocks.*.mlp.up.weight"] = (
            Fused(f"{up}_0.weight", f"{up}_1.weight") if gated else f"{up}.weight"
        )
    cross = f"{decoder}.1.EncDecAttention"
    tensors |= {
        "decoder.memories.*.kv.weight": Fused(f"{cross}.k.weight", f"{cross}.v.weight"),
        "decoder.blocks.*.cross.q.weight": f"{cross}.q.weight",
        "decoder.blocks.*.cross.out.weight": f"{cross}.o.weight",
        "decoder.blocks.*.norm_cross.weight": f"{decoder}.1.layer_norm.weight",
    }
    return ExternalNames(
        tensors,
        copies={f"{stack}.embed_tokens.weight": "encoder.embedding.token.weight" for stack in ("encoder", "decoder")},
        ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    )
