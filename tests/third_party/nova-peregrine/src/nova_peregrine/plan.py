"""What the decoder publishes: its units, what the dimensions of its parameters mean, its FLOPs."""

from typing import TYPE_CHECKING

from mplug import Flops, Init, Parameter, Plan, Segment, Unit

if TYPE_CHECKING:
    from nova_peregrine import Peregrine

ONES = Init("constant", value=1.0)


def make_plan(config: "Peregrine.Config") -> Plan:
    """The plan of a decoder."""
    inputs, packed = ("hidden", "positions", "keys"), ("document_lengths",)
    layers = [Unit(f"layers.{n}", inputs, ("hidden",), optional=packed) for n in range(config.num_layers)]
    body = (Unit("embedding", ("tokens",), ("hidden",)), *layers)
    return Plan(
        units=(*body, Unit("readout", ("hidden", "labels"), ("loss", "num_targets"))),
        inference=(*body, Unit("readout", ("hidden",), ("logits",), method="logits")),
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
        tied=(("embedding.weight", "readout.project.weight"),) if config.tie_embeddings else (),
        flops=_flops(config),
    )


def _parameters(config: "Peregrine.Config") -> dict[str, Parameter]:
    weight = Init("normal", std=config.init_std)
    residual = Init("normal", std=config.init_std / config.num_layers**0.5)  # a block adds to the stream once
    heads = Segment("heads", config.num_attention_heads, config.head_dim)
    keys_or_values = Segment("kv_heads", config.num_kv_heads, config.head_dim, uneven="copy")
    mlp = Segment("mlp", config.ffn_hidden_size)
    vocab = Segment("vocab", config.vocab_size, uneven="pad")
    parameters = {
        "embedding.weight": Parameter((vocab, "embed"), weight),
        "layers.*.norm.weight": Parameter(("embed",), ONES),
        "layers.*.enter.weight": Parameter(((heads, keys_or_values, keys_or_values, mlp, mlp), "embed"), weight),
        "layers.*.leave.weight": Parameter(("embed", (heads, mlp)), residual),
        "readout.norm.weight": Parameter(("embed",), ONES),
    }
    if not config.tie_embeddings:
        parameters["readout.project.weight"] = Parameter((vocab, "embed"), weight)
    if config.qk_norm:
        parameters["layers.*.attn.q_norm"] = Parameter(("head_dim",), ONES, over=("batch", "sequence", "heads"))
        parameters["layers.*.attn.k_norm"] = Parameter(("head_dim",), ONES, over=("batch", "sequence", "kv_heads"))
    return parameters


def _flops(config: "Peregrine.Config") -> Flops:
    """6 FLOPs a weight and token in matrix products, and causal attention counted once (6 layers, heads and pairs)."""
    queries = config.num_attention_heads * config.head_dim
    enter = queries + 2 * config.num_kv_heads * config.head_dim + 2 * config.ffn_hidden_size
    leave = queries + config.ffn_hidden_size
    per_token = 6 * config.hidden_size * (config.num_layers * (enter + leave) + config.vocab_size)
    return Flops(per_token, 6 * config.num_layers * queries)
