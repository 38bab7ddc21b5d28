"""One installed plugin, as the metadata of its distribution describes it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One installed plugin, as its distribution's metadata describes it."""

    kind: str
    name: str
    target: str
    distribution: str
    version: str
    summary: str
    speaks: str | None
    source: str

    @property
    def label(self) -> str:
        """How errors and records name it: 'models/gpt'."""
        return f"{self.kind}/{self.name}"

    @property
    def origin(self) -> str:
        """'mplug-gpt 0.1.0'."""
        return f"{self.distribution} {self.version}"
