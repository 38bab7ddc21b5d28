"""Initial values that modules share, and the type of what a module contributes to a plan."""

from collections.abc import Mapping
from typing import NamedTuple

from mplug.layout.plan import Buffer, Init, Parameter

ONES, ZEROS = Init("constant", value=1.0), Init("constant", value=0.0)

TOKENS = ("batch", "sequence")

Entries = Mapping[str, Parameter | Buffer]
"""The result of a block's method `plan_entries`: names relative to the block, with the meaning of what they name.

A block describes its own parameters and buffers, and those of inner modules that cannot know their axes (a `Linear`).
"""


class Inits(NamedTuple):
    """The initial values of a model's matrices: of most of them, and of projections into the residual stream."""

    weight: Init
    residual: Init

    @classmethod
    def normal(cls, std: float, residual_std: float) -> "Inits":
        """Normal values with these standard deviations."""
        return cls(Init("normal", std=std), Init("normal", std=residual_std))
