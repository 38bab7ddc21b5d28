"""What the decoder publishes: its units, what the dimensions of its parameters mean, its FLOPs."""

from typing import TYPE_CHECKING

from mplug import Flops, Init, Parameter, Plan, Segment, Unit

if TYPE_CHECKING:
    from nova_lento import Lento


def make_plan(config: "Lento.Config") -> Plan:
    """The plan of a decoder."""
    blocks = [Unit(f"blocks.{n}", ("hidden",), ("hidden",)) for n in range(config.num_layers)]
    body = (Unit("embedding", ("tokens",), ("hidden",)), *blocks)
    weights = config.num_layers * 4 * config.hidden_size * config.state_size + config.hidden_size * config.vocab_size
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
        flops=Flops(6 * weights, 0),
    )


def _parameters(config: "Lento.Config") -> dict[str, Parameter]:
    weight, ones = Init("normal", std=config.init_std), Init("constant", value=1.0)
    state = Segment("mlp", config.state_size)
    vocab = Segment("vocab", config.vocab_size, uneven="pad")
    return {
        "embedding.weight": Parameter((vocab, "embed"), weight),
        "blocks.*.norm.weight": Parameter(("embed",), ones),
        "blocks.*.enter.weight": Parameter(((state, state, state), "embed"), weight),
        "blocks.*.scan.decay": Parameter((state,), ones),
        "blocks.*.leave.weight": Parameter(("embed", state), weight),
        "head.norm.weight": Parameter(("embed",), ones),
        "head.project.weight": Parameter((vocab, "embed"), weight),
    }
