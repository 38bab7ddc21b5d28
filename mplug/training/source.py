"""Where the micro batches of a rank come from."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mplug.layout.plan import Plan
    from mplug.run.run import Run


@dataclass(frozen=True)
class Source:
    """The plugin and the split of a loader, and the shape of its micro batches on this rank.

    `plan` is that of the model, which states the streams of micro batches.
    """

    plugin: str
    split: str
    seq_length: int
    shards: int
    rank: int
    micro_batch_size: int = 0
    part: int = 0
    """The number of this rank's part of the batch, among `shards` parts."""
    plan: "Plan | None" = None

    @staticmethod
    def of(run: "Run", split: str, plan: "Plan | None" = None) -> "Source":
        """The source of a run's split; `plan` is that of the model."""
        (plugin,) = run.hooks.implementers("build_loader")
        part, shards = run.mesh.batch_shard(run.rank)
        length, size = run.config.trainer.seq_length, run.micro_batch_size
        return Source(plugin, split, length, shards, run.rank, size, part, plan)
