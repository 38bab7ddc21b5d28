"""A strategy, for layouts."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from mplug import Axis, contiguous, hookimpl

if TYPE_CHECKING:
    from mplug import RunConfig


class Slab:
    """Splits the batch into slabs."""

    class Config(BaseModel):
        """Nothing to set."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def mesh_axes(self, config: "RunConfig") -> list[Axis]:
        """One axis over the batch."""
        return [Axis("slab", config.parallel.degrees["slab"], entries={"batch": contiguous})]
