"""The declaration of the named axes that a module mixes."""

from dataclasses import dataclass

from torch import nn

from mplug.layout.mesh import Axis
from mplug.layout.names import role_of
from mplug.layout.plan import TOKENS_AXIS


@dataclass(frozen=True)
class Statement:
    """The declaration of a module: the named axes that it mixes, or None if nothing declares them.

    `sequence` is the named axis along which the rows of the module's unit lie. A module of a stream calls its own rows
    'sequence' too.
    """

    name: str
    module: nn.Module
    axes: frozenset[str] | None
    sequence: str = TOKENS_AXIS

    def rows_divided_by(self, axis: Axis) -> bool:
        """Whether ranks along a mesh axis see different rows of the module's unit.

        An axis that divides the sequence of activations (sequence parallelism) divides the rows of every unit.
        """
        in_a_stream = self.sequence != TOKENS_AXIS
        return TOKENS_AXIS in axis.activations or axis.divides(self.sequence) or (in_a_stream and axis.shares_streams)

    @property
    def kind(self) -> str:
        """The name of the module's class."""
        return type(self.module).__qualname__

    @property
    def label(self) -> str:
        """The module's role and class: "'blocks.*.scan' (Recurrence)"."""
        return f"'{role_of(self.name)}' ({self.kind})"
