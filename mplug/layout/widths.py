"""How much wider a parameter is than in the base model of a parametrization by widths (μP)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Widths:
    """The sizes of a parameter's matrix over those in the base model (μP, arXiv 2203.03466).

    `outputs` is the ratio of the rows, and `inputs` that of the columns: the numbers that each output is a sum of. A
    vector, and a vector of a look-up table, has one input in every model: its `inputs` is 1. The table of an output
    head counts as one too, if forward divides the logits by the ratio of the widths (table 8 of the paper).
    """

    outputs: float = 1.0
    inputs: float = 1.0
