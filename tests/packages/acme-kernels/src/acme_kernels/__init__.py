"""Kernels that say what they can, a wrap that says what it needs, a strategy, and rivals of other plugins of a run."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from mplug import Axis, Offer, Site, Wrap, contiguous, hookimpl

if TYPE_CHECKING:
    from mplug import Run, RunConfig


class Plain:
    """A plugin without options."""

    class Config(BaseModel):
        """Nothing to set."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config


class Picky(Plain):
    """A kernel that serves no machine."""

    @hookimpl
    def offer(self) -> list[Offer]:
        """An attention core that never fits."""
        return [Offer({"Attention.core": _attention}, _wants_a_chip)]


def _wants_a_chip(site: Site, run: "Run") -> str:
    return "it needs a chip of the year 2040"


class Verbose(Plain):
    """A kernel that returns the largest scores as well, and can do nothing else."""

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


class Slab(Plain):
    """A strategy that splits the batch into slabs."""

    @hookimpl
    def mesh_axes(self, config: "RunConfig") -> list[Axis]:
        """One axis over the batch."""
        return [Axis("slab", config.parallel.degrees["slab"], entries={"batch": contiguous})]


class Usurper(Plain):
    """An extension that builds a model, beside the run's model family."""

    @hookimpl
    def build_model(self) -> Any:
        """Never called."""
        raise AssertionError("two plugins answer build_model, and one of them was called")


class Meddler(Plain):
    """An extension that supplies the attention core, beside the run's kernel."""

    @hookimpl
    def offer(self) -> list[Offer]:
        """Never selected beside another."""
        return [Offer({"Attention.core": _attention})]
