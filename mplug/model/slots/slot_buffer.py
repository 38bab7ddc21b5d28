"""What an offer declares of the tensors that its supplier keeps for a site. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from mplug.layout.plan import Buffer, Segment


@dataclass(frozen=True)
class SlotBuffer:
    """A tensor that a supplier keeps for one site, in fp32 (fp64 in a run in fp64). Every element starts as `value`.

    `shape` is that of the whole model, `dims` has one entry per dimension: a named axis or segments, as in
    `Parameter.dims`. A mesh axis that splits a named axis also splits the buffer.

    With empty `over` it is a state: checkpoints hold it, and only `Offer.step_ended` changes it. Otherwise it is a
    statistic of a step. `over` are the named axes of the operands from which its values come: ('batch', 'sequence',
    'embed') for the largest element of an input [B, S, D], the axes of the weight for that of a weight. In each forward
    and backward pass the supplier adds to it (`reduction` 'sum') or keeps the maximum ('max'). The host reduces it over
    the micro batches, and over exactly those mesh axes whose ranks have different parts of `over`.
    """

    shape: tuple[int, ...] = ()
    dims: tuple[str | Segment | tuple[Segment, ...], ...] = ()
    value: float = 0.0
    over: tuple[str, ...] = ()
    reduction: Literal["sum", "max"] = "sum"

    def __post_init__(self) -> None:
        for field, value in (("shape", self.shape), ("dims", self.dims), ("over", self.over)):
            if not isinstance(value, tuple):
                raise ValueError(f"`{field}` of a buffer is a tuple, not {value!r}")
        if len(self.shape) != len(self.dims):
            raise ValueError(f"a buffer of shape {self.shape} needs {len(self.shape)} dims, not {len(self.dims)}")
        if self.over and self.reduction == "sum" and self.value:
            raise ValueError(f"a sum starts a step at zero, not at {self.value}")
        self.described.__post_init__()

    @property
    def described(self) -> Buffer:
        """The entry of the plan."""
        return Buffer(self.dims, self.value, self.over, reduction=self.reduction, reported=False)
