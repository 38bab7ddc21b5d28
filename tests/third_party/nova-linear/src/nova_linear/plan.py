"""What the decoder publishes: its units, what the dimensions of its parameters mean, its FLOPs."""

from typing import TYPE_CHECKING

from mplug import Flops, Init, Parameter, Plan, Segment, Unit

if TYPE_CHECKING:
    from nova_linear import LinearTransformer

ONES = Init("constant", value=1.0)


def make_plan(config: "LinearTransformer.Config") -> Plan:
    """The plan of a decoder."""
    blocks = [Unit(f"blocks.{n}", ("hidden", "positions", "keys"), ("hidden",)) for n in range(config.num_layers)]
    body = (Unit("embedding", ("tokens", "positions"), ("hidden",)), *blocks)
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
        },
        activations={
            "hidden": ("batch", "sequence", "embed"),
            "loss": (),
            "num_targets": (),
            "logits": ("batch", "sequence", "vocab"),
        },
        flops=_flops(config),
    )


def _parameters(config: "LinearTransformer.Config") -> dict[str, Parameter]:
    weight = Init("normal", std=config.init_std)
    residual = Init("normal", std=config.init_std / (2 * config.num_layers) ** 0.5)  # GPT-2, section 2.3
    heads = Segment("heads", config.num_attention_heads, config.head_dim)
    keys_or_values = Segment("kv_heads", config.num_attention_heads, config.head_dim, uneven="copy")
    vocab, mlp = Segment("vocab", config.vocab_size, uneven="pad"), Segment("mlp", 4 * config.hidden_size)
    return {
        "embedding.token.weight": Parameter((vocab, "embed"), weight),
        "embedding.position.weight": Parameter(("positions", "embed"), weight),
        "blocks.*.norm1.weight": Parameter(("embed",), ONES),
        "blocks.*.attn.qkv.weight": Parameter(((heads, keys_or_values, keys_or_values), "embed"), weight),
        "blocks.*.attn.out.weight": Parameter(("embed", heads), residual),
        "blocks.*.norm2.weight": Parameter(("embed",), ONES),
        "blocks.*.mlp.up.weight": Parameter((mlp, "embed"), weight),
        "blocks.*.mlp.down.weight": Parameter(("embed", mlp), residual),
        "head.norm.weight": Parameter(("embed",), ONES),
        "head.project.weight": Parameter((vocab, "embed"), weight),
    }


def core_flops(num_heads: int, key_width: int, value_width: int) -> Flops:
    """Of one layer's linear attention: a token adds its key times its value to a matrix, and its query reads it."""
    return Flops(per_token=3 * 2 * num_heads * 2 * key_width * value_width, per_squared_length=0)


def _flops(config: "LinearTransformer.Config") -> Flops:
    """6 FLOPs a weight and token in matrix products, and linear attention, which has none by the squared length."""
    hidden = config.hidden_size
    weights = config.num_layers * (4 * hidden * hidden + 2 * hidden * 4 * hidden) + hidden * config.vocab_size
    core = core_flops(config.num_attention_heads, config.head_dim, config.head_dim)
    return Flops(6 * weights + config.num_layers * core.per_token, 0)
