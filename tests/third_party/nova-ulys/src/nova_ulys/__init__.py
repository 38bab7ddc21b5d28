"""Ulysses: every sample's sequence divided over ranks (arXiv 2309.14509)."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from mplug import Axis, contiguous, hookimpl

if TYPE_CHECKING:
    from mplug import Run, RunConfig, Wrap


class Ulysses:
    """Ranks hold parts of the sequence; around attention they hold parts of the heads instead."""

    class Config(BaseModel):
        """It has nothing to set."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def mesh_axes(self, config: "RunConfig") -> list[Axis]:
        """One axis that divides the sequence of batch entries; its ranks talk in every block, and sit near."""
        return [Axis("ulys", config.parallel.degrees["ulys"], entries={"sequence": contiguous}, distance=10)]

    @hookimpl
    def offer(self, run: "Run") -> "list[Wrap]":
        """All-to-alls around every attention core."""
        from nova_ulys.exchange import around_attention

        return [around_attention(run)]
