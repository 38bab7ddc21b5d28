"""The names of GPT-2's tensors (Radford et al. 2019)."""

from mplug_pretrained import ExternalNames, Transposed


def names(*, bias: bool, learned: bool) -> ExternalNames:
    """Where GPT-2 keeps the parameters. Its matrices are [in, out]. `learned`: it has learned positions."""
    block = "transformer.h.*"
    matrices = {
        "attn.qkv": "attn.c_attn",
        "attn.out": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    norms = {"norm1": "ln_1", "norm2": "ln_2"}
    biased = {**norms, **matrices} if bias else {}
    positions = {"embedding.position.weight": "transformer.wpe.weight"} if learned else {}
    return ExternalNames(
        {
            "embedding.token.weight": "transformer.wte.weight",
            **positions,
            **{f"blocks.*.{ours}.weight": Transposed(f"{block}.{theirs}.weight") for ours, theirs in matrices.items()},
            **{f"blocks.*.{ours}.weight": f"{block}.{theirs}.weight" for ours, theirs in norms.items()},
            **{f"blocks.*.{ours}.bias": f"{block}.{theirs}.bias" for ours, theirs in biased.items()},
            "head.norm.weight": "transformer.ln_f.weight",
            **({"head.norm.bias": "transformer.ln_f.bias"} if bias else {}),
            "head.project.weight": "lm_head.weight",
        },
        prefix="transformer.",
        ignored=(f"{block}.attn.bias", f"{block}.attn.masked_bias"),  # causal masks of older releases
    )
