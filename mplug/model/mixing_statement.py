"""What is known about how a module mixes tokens."""

from dataclasses import dataclass

from torch import nn

from mplug.layout.names import role_of


@dataclass(frozen=True)
class Statement:
    """The declaration of a module: the named axes that it mixes, or None if nothing declares them."""

    name: str
    module: nn.Module
    axes: frozenset[str] | None

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self.module).__qualname__

    @property
    def told(self) -> str:
        """Its role and class: "'blocks.*.scan' (Recurrence)"."""
        return f"'{role_of(self.name)}' ({self.kind})"
