"""What the decoder publishes beside what its modules declare: its units, and the axes of what they exchange."""

from typing import TYPE_CHECKING

from mplug import Inits, Plan, Unit, describe

if TYPE_CHECKING:
    from nova_linear import LinearTransformer
    from nova_linear.decoder import Decoder

TOKENS = ("batch", "sequence")


def make_plan(decoder: "Decoder", config: "LinearTransformer.Config") -> Plan:
    """The plan of a decoder; projections into the residual stream begin smaller (GPT-2, section 2.3)."""
    blocks = [Unit(f"blocks.{n}", ("hidden", "positions", "keys"), ("hidden",)) for n in range(config.num_layers)]
    body = (Unit("embedding", ("tokens", "positions"), ("hidden",)), *blocks)
    inits = Inits.normal(config.init_std, config.init_std / (2 * config.num_layers) ** 0.5)
    return describe(decoder, inits).plan(
        units=(*body, Unit("head", ("hidden", "labels"), ("loss", "num_targets"))),
        inference=(*body, Unit("head", ("hidden",), ("logits",), method="logits")),
        context=dict.fromkeys(("tokens", "labels", "positions"), TOKENS)
        | dict.fromkeys(("sample_ids", "keys"), ("batch",)),
        activations={"hidden": (*TOKENS, "embed"), "loss": (), "num_targets": (), "logits": (*TOKENS, "vocab")},
    )
