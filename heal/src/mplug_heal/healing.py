"""The extension `heal`: a run goes on in its other processes after one has died."""

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from mplug import hookimpl
from mplug_heal.keepers import covers

if TYPE_CHECKING:
    from pathlib import Path

    from mplug.config.sources import Settings
    from mplug.distributed.world import World
    from mplug.run.launching import Healing
    from mplug.run.run import Run
    from mplug.training.healing import Healer
    from mplug.training.saving import Position


class Heal:
    """Continues a run in its other processes, from copies in their memory, when a process dies or hangs."""

    source = "the copies in its processes"

    class Config(BaseModel):
        """Which processes replace a dead one, and how often the processes copy their state."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        spares: NonNegativeInt = Field(
            0,
            description="processes that wait from the start of the run, each of which can replace a dead one (not on "
            "GPUs)",
        )
        fewer: bool = Field(
            True,
            description="without a spare process, go on with fewer data-parallel ranks: the global batch stays the "
            "same, in more micro batches for each rank",
        )
        every: PositiveInt | Literal["auto"] = Field(
            "auto",
            description="steps between two copies of the state; a death repeats the steps since the last one; 'auto': "
            "the interval that loses the least time, by the measured cost of a copy and hours_between_failures",
        )
        hours_between_failures: PositiveFloat | None = Field(
            None,
            description="for every=auto: the mean time between two failures of the run; null: 50,700 hours divided by "
            "the number of ranks, as with the H100s of Llama 3 405B",
        )

    def __init__(self, config: Config) -> None:
        self.config = config
        self._copies: Copying | None = None

    @hookimpl
    def heal(self, run: "Run") -> "Healer":
        """This object: it is a `Healer`."""
        return self

    def plan(self, run: "Run", world: "World | None", base: "Settings", overrides: "Settings") -> "Healing":
        """The layouts with fewer data-parallel ranks under which the run could go on."""
        from mplug.run.launching import Healing
        from mplug_heal.smaller import refuse_unhealable, rehearsed, smaller_layouts

        if run.mesh.world_size == 1 and any(key[:2] == ("extensions", "heal") for key in base):
            return Healing(0, {}, covers, rehearsed)  # resumed after deaths that have left one process
        refuse_unhealable(run, world, self.config.spares)
        layouts = smaller_layouts(run, base, overrides) if self.config.fewer else {}
        if not layouts and not self.config.spares:
            from mplug.errors import UsageError

            raise UsageError(
                f"extensions.heal: layout '{run.config.parallel.layout}' cannot go on with fewer processes"
                f"{'' if self.config.fewer else ' (extensions.heal.fewer=false)'}, and there is no spare one; set "
                f"extensions.heal.spares=1"
            )
        return Healing(self.config.spares, layouts, covers, rehearsed)

    def restore(
        self, run: "Run", position: "Position", newest: "Path | None" = None, allowed: tuple[str, ...] = ()
    ) -> bool:
        """Continue after the last step whose copies the processes hold completely."""
        from mplug_heal.copies import Copying, restore, saved_position

        self._copies = Copying(self.config.every, self.config.hours_between_failures)
        return restore(run, saved_position(position), self._copies)

    def is_due(self, run: "Run", saves: bool) -> bool:
        """Whether to copy the state after this step."""
        assert self._copies is not None
        return saves or self._copies.is_due(run)

    def keep(self, run: "Run", position: "Position") -> None:
        """Copy the state after this step; a run asks for `restore` before."""
        from mplug_heal.copies import saved_position

        assert self._copies is not None
        self._copies.keep(run, saved_position(position))


if TYPE_CHECKING:
    from mplug_heal.copies import Copying
