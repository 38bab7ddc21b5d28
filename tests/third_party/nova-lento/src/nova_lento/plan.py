"""What the decoder publishes beside what its modules declare: its units, and the axes of what they exchange."""

from typing import TYPE_CHECKING

from mplug import Inits, Plan, Unit, describe

if TYPE_CHECKING:
    from nova_lento import Lento
    from nova_lento.decoder import Decoder

TOKENS = ("batch", "sequence")


def make_plan(decoder: "Decoder", config: "Lento.Config") -> Plan:
    """The plan of a decoder."""
    blocks = [Unit(f"blocks.{n}", ("hidden",), ("hidden",)) for n in range(config.num_layers)]
    body = (Unit("embedding", ("tokens",), ("hidden",)), *blocks)
    return describe(decoder, Inits.normal(config.init_std, config.init_std)).plan(
        units=(*body, Unit("head", ("hidden", "labels"), ("loss", "num_targets"))),
        inference=(*body, Unit("head", ("hidden",), ("logits",), method="logits")),
        context=dict.fromkeys(("tokens", "labels", "positions"), TOKENS)
        | dict.fromkeys(("sample_ids", "keys"), ("batch",)),
        activations={"hidden": (*TOKENS, "embed"), "loss": (), "num_targets": (), "logits": (*TOKENS, "vocab")},
    )
