"""The decoder's plan: its units, the named axes of its parameters, its FLOPs."""

from typing import TYPE_CHECKING

from mplug import Flops, Init, Parameter, Plan, Segment, Unit

if TYPE_CHECKING:
    from mplug_gpt.config import GPTConfig

ONES, ZEROS = Init("constant", value=1.0), Init("constant", value=0.0)


def make_plan(config: "GPTConfig") -> Plan:
    """The plan of a decoder."""
    takes, packed = ("hidden", "positions", "keys"), ("document_lengths",)
    blocks = [Unit(f"blocks.{n}", takes, ("hidden",), optional=packed) for n in range(config.num_layers)]
    body = (Unit("embedding", ("tokens", "positions", "keys"), ("hidden",)), *blocks)
    return Plan(
        units=(*body, Unit("head", ("hidden", "labels"), ("loss", "num_targets"))),
        inference=(*body, Unit("head", ("hidden",), ("logits",), method="logits")),
        parameters=_parameters(config),
        context={
            "tokens": ("batch", "sequence"),
            "labels": ("batch", "sequence"),
            "positions": ("batch", "sequence"),
            "sample_ids": ("batch",),
            "keys": ("batch",),
            "document_lengths": ("batch", "documents"),
        },
        activations={
            "hidden": ("batch", "sequence", "embed"),
            "loss": (),
            "num_targets": (),
            "logits": ("batch", "sequence", "vocab"),
        },
        tied=(("embedding.token.weight", "head.project.weight"),) if config.tie_embeddings else (),
        flops=_flops(config),
    )


def _parameters(config: "GPTConfig") -> dict[str, Parameter]:
    weight = Init("normal", std=config.init_std)
    residual = Init("normal", std=config.init_std / (2 * config.num_layers) ** 0.5)  # GPT-2, section 2.3
    width, kv_heads = config.head_width, config.kv_heads
    heads = Segment("heads", config.num_attention_heads, width)
    keys_or_values = Segment("kv_heads", kv_heads, width, uneven="copy")
    qkv = (heads, keys_or_values, keys_or_values)
    vocab = Segment("vocab", config.vocab_size, uneven="pad")
    mlp = Segment("mlp", config.ffn_width)
    up = (mlp, mlp) if config.activation == "swiglu" else mlp
    parameters = {
        "embedding.token.weight": Parameter((vocab, "embed"), weight),
        "blocks.*.norm1.weight": Parameter(("embed",), ONES),
        "blocks.*.attn.qkv.weight": Parameter((qkv, "embed"), weight),
        "blocks.*.attn.out.weight": Parameter(("embed", heads), residual),
        "blocks.*.norm2.weight": Parameter(("embed",), ONES),
        "blocks.*.mlp.up.weight": Parameter((up, "embed"), weight),
        "blocks.*.mlp.down.weight": Parameter(("embed", mlp), residual),
        "head.norm.weight": Parameter(("embed",), ONES),
    }
    if not config.tie_embeddings:
        parameters["head.project.weight"] = Parameter((vocab, "embed"), weight)
    if config.position == "learned":
        parameters["embedding.position.weight"] = Parameter(("positions", "embed"), weight, over=("batch", "sequence"))
    if config.qk_norm:
        parameters["blocks.*.attn.q_norm"] = Parameter(("head_dim",), ONES, over=("batch", "sequence", "heads"))
        parameters["blocks.*.attn.k_norm"] = Parameter(("head_dim",), ONES, over=("batch", "sequence", "kv_heads"))
    if config.bias:
        parameters |= {
            "blocks.*.attn.qkv.bias": Parameter((qkv,), ZEROS),
            "blocks.*.attn.out.bias": Parameter(("embed",), ZEROS),
            "blocks.*.mlp.up.bias": Parameter((up,), ZEROS),
            "blocks.*.mlp.down.bias": Parameter(("embed",), ZEROS),
        }
        if config.norm == "layernorm":
            norms = ("blocks.*.norm1.bias", "blocks.*.norm2.bias", "head.norm.bias")
            parameters |= dict.fromkeys(norms, Parameter(("embed",), ZEROS))
    return parameters


def _flops(config: "GPTConfig") -> Flops:
    """6 FLOPs a weight and token in matrix products, and causal attention counted once (6 layers, heads and pairs)."""
    hidden, queries = config.hidden_size, config.num_attention_heads * config.head_width
    attention = hidden * (queries + 2 * config.kv_heads * config.head_width) + queries * hidden
    mlp = (3 if config.activation == "swiglu" else 2) * hidden * config.ffn_width
    per_token = 6 * (config.num_layers * (attention + mlp) + hidden * config.vocab_size)
    return Flops(per_token, 6 * config.num_layers * queries)
