"""Kernels that say what they can, and a wrap that says what it needs."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from mplug import Offer, Site, Wrap, hookimpl

if TYPE_CHECKING:
    from mplug import Run


class Empty(BaseModel):
    """Nothing to set."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Picky:
    """A kernel that serves no machine."""

    Config = Empty

    def __init__(self, config: Empty) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Offer]:
        """An attention core that never fits."""
        return [Offer({"Attention.core": _attention}, _wants_a_chip)]


def _wants_a_chip(site: Site, run: "Run") -> str:
    return "it needs a chip of the year 2040"


class Verbose:
    """A kernel that returns the largest scores as well, and can do nothing else."""

    Config = Empty

    def __init__(self, config: Empty) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Offer]:
        """An attention core for those who need its largest scores."""
        return [Offer({"Attention.core": _attention}, serves={"largest scores"})]


def _attention(*arguments: Any, **named: Any) -> Any:
    raise AssertionError("these kernels are selected and refused, never called")


class Ring:
    """An extension that wraps the attention core and needs something of it."""

    class Config(BaseModel):
        """What it needs."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        need: str = Field("largest scores", description="what the attention core must offer")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Wrap]:
        """A wrap that passes everything through."""
        return [Wrap("Attention.core", _unchanged, layer=0, needs=frozenset({self.config.need}))]


def _unchanged(inner: Callable[..., Any]) -> Callable[..., Any]:
    return inner
