"""Linear layers and experts with emulated quantisation and delayed scaling (arXiv 2209.05433), as third parties write.

The scale of an operand comes from its largest values in the last steps. So the supplier keeps a history per site, and
collects the largest value of a step in forward (input, weight) and in backward (gradient of the output).
"""

from collections.abc import Mapping
from functools import partial

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from mplug import Offer, Site, SlotBuffer, hookimpl

TOKENS = ("batch", "sequence")


class Delayed:
    """The products of linear layers and experts, with operands rounded to a grid of the largest recent values."""

    class Config(BaseModel):
        """The grid, and how long largest values are remembered."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        history: PositiveInt = Field(4, description="steps whose largest values determine a scale")
        bits: PositiveInt = Field(8, description="bits of a number of the grid, with its sign")
        margin: float = Field(1.0, ge=1, description="factor from the largest remembered value to the grid's end")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Offer]:
        """The products, and what they keep for each layer."""
        from acme_delayed import experts
        from acme_delayed.products import products, step_ended

        gemm = products(self.config.bits, self.config.margin)
        groups = experts.Groups(self.config.bits, self.config.margin)
        of_groups = partial(experts.buffers, history=self.config.history)
        return [
            Offer({"Linear.gemm": gemm}, buffers=self.buffers, step_ended=step_ended),
            Offer({"Experts.product": groups}, buffers=of_groups, step_ended=experts.step_ended),
        ]

    def buffers(self, site: Site) -> Mapping[str, SlotBuffer]:
        """Largest values of a step, a history of them, and figures that tests read.

        `total` and `row_totals` are sums of absolute values in a step: those of the input, and those of each output's
        gradient. `last_total` and `last_row_totals` keep those of the last step.
        """
        outputs, inputs = site.axes("weight", 0), site.axes("weight", 1)
        rows = {"shape": (site.module.weight.shape[0],), "dims": site.parameters["weight"].dims[:1]}
        return {
            "input": SlotBuffer(over=(*TOKENS, *inputs), reduction="max"),
            "weight": SlotBuffer(over=(*outputs, *inputs), reduction="max"),
            "gradient": SlotBuffer(over=(*TOKENS, *outputs), reduction="max"),
            "history": SlotBuffer((3, self.config.history), ("operand", "step")),
            "total": SlotBuffer(over=(*TOKENS, *inputs)),
            "last_total": SlotBuffer(),
            "row_totals": SlotBuffer(**rows, over=TOKENS),
            "last_row_totals": SlotBuffer(**rows),
        }
