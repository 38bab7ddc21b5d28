"""The declaration of the named axes that a module mixes."""

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
        """The name of the module's class."""
        return type(self.module).__qualname__

    @property
    def label(self) -> str:
        """The module's role and class: "'blocks.*.scan' (Recurrence)"."""
        return f"'{role_of(self.name)}' ({self.kind})"
