"""The names of tensors that most families share. No torch."""

from mplug_nn.decoders.general import GeneralDecoderConfig
from mplug_pretrained.external import External, ExternalNames, Fused

LAYER = "model.layers.*"
"""The pattern of a block in published names."""
NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
SANDWICH = {
    "norm1": "input_layernorm",
    "post_norm1": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "post_norm2": "post_feedforward_layernorm",
}
"""Our norms of a block -> the published ones, without and with norms of the outputs of its parts."""
Names = dict[str, External]


def published_names(
    config: GeneralDecoderConfig, *, attention: Names | None = None, experts: Names | None = None
) -> ExternalNames:
    """The names that most families share (those of Llama and Qwen3-MoE), for the parameters that a config has.

    `attention` and `experts` replace the names of a block's attention and of its experts with their router. Their keys
    are relative to the block ('attn.out.weight'), their public names absolute, with '*' for the block (`LAYER`).
    """
    norms = SANDWICH if config.post_norms else NORMS
    block: Names = {f"{ours}.weight": f"{LAYER}.{theirs}.weight" for ours, theirs in norms.items()}
    block |= attention_names(config) if attention is None else attention
    kinds = {config.has_experts(number) for number in range(config.num_layers)}
    if False in kinds:
        block |= mlp_names("mlp", f"{LAYER}.mlp", bias=config.mlp_bias)
    if True in kinds:
        block |= expert_names(config) if experts is None else experts
        block |= _states(config)
    return ExternalNames(
        {
            "embedding.token.weight": "model.embed_tokens.weight",
            **{f"blocks.*.{ours}": theirs for ours, theirs in block.items()},
            "head.norm.weight": "model.norm.weight",
            "head.project.weight": "lm_head.weight",
        },
        prefix="model.",
        ignored=(f"{LAYER}.self_attn.rotary_emb.inv_freq",),  # older releases saved it
    )


def attention_names(config: GeneralDecoderConfig) -> Names:
    """Separate projections to queries, keys and values."""
    at = f"{LAYER}.self_attn"

    def fused(kind: str) -> Fused:
        return Fused(*(f"{at}.{one}_proj.{kind}" for one in "qkv"))

    found: Names = {"attn.qkv.weight": fused("weight"), "attn.out.weight": f"{at}.o_proj.weight"}
    found |= {"attn.qkv.bias": fused("bias")} if config.qkv_bias else {}
    found |= {"attn.out.bias": f"{at}.o_proj.bias"} if config.attention_out_bias else {}
    found |= {f"attn.{one}_norm": f"{at}.{one}_norm.weight" for one in "qk"} if config.qk_norm else {}
    return found | ({"attn.sinks": f"{at}.sinks"} if config.attention_sinks else {})


def mlp_names(ours: str, theirs: str, *, bias: bool = False) -> Names:
    """A gated MLP: separate projections gate and up."""
    found: Names = {}
    for kind in ("weight", "bias") if bias else ("weight",):
        found[f"{ours}.up.{kind}"] = Fused(f"{theirs}.gate_proj.{kind}", f"{theirs}.up_proj.{kind}")
        found[f"{ours}.down.{kind}"] = f"{theirs}.down_proj.{kind}"
    return found


def expert_names(config: GeneralDecoderConfig) -> Names:
    """One tensor for each matrix of each expert; the router, and the shared experts as one MLP."""
    at = f"{LAYER}.mlp"
    found: Names = {
        "moe.router.weight": f"{at}.gate.weight",
        "moe.experts.up": Fused(f"{at}.experts.{{}}.gate_proj.weight", f"{at}.experts.{{}}.up_proj.weight"),
        "moe.experts.down": f"{at}.experts.{{}}.down_proj.weight",
    }
    if config.expert_bias or config.expert_bias_rate:
        found["moe.router.bias"] = f"{at}.gate.e_score_correction_bias"
    if config.num_shared_experts:
        found |= mlp_names("moe.shared", f"{at}.shared_experts")
    return found


def _states(config: GeneralDecoderConfig) -> Names:
    return {"moe.router.last_load": None} if config.moe_balance == "global_batch" else {}
