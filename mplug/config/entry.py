"""One installed plugin, as the metadata of its distribution describes it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One installed plugin, as its distribution's metadata describes it."""

    kind: str
    name: str
    target: str
    """The object that the entry point names: 'mplug_gpt:GPT'."""
    distribution: str
    version: str
    summary: str
    requires: str | None
    """The versions of mplug that the distribution requires ('>=0.1,<0.2'); None if it states no requirement."""
    source: str
    """The folder of the distribution, or of its source in an editable install."""

    @property
    def label(self) -> str:
        """The name in errors and records: 'models/gpt'."""
        return f"{self.kind}/{self.name}"

    @property
    def origin(self) -> str:
        """'mplug-gpt 0.1.0'."""
        return f"{self.distribution} {self.version}"
