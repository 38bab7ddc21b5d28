"""What each token of a sample sees of the model's streams, so that samples of different micro batches can be compared.

The rows of a stream belong to a whole micro batch, and the entries that refer to them count from its beginning
(`mplug.Stream`). A `StreamBatch` knows the plan. `seen` replaces a reference by a digest of the rows that it refers to.
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, cast

from mplug.contracts.streams import STREAMS

if TYPE_CHECKING:
    from torch import Tensor

    from mplug.contracts.loader import Loader
    from mplug.contracts.micro_batch import MicroBatch
    from mplug.layout.plan import Plan, Stream
    from mplug.run.run import Run


class StreamBatch(dict[str, "Tensor"]):
    """A micro batch of a model with streams, and the model's plan."""

    def __init__(self, batch: "MicroBatch", plan: "Plan") -> None:
        super().__init__(batch)
        self.plan = plan


class StreamLoader:
    """A loader whose micro batches are `StreamBatch`es; everything else is that of the loader it wraps."""

    def __init__(self, loader: "Loader", plan: "Plan") -> None:
        self._loader, self._plan = loader, plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def take(self, num_samples: int) -> "Iterator[MicroBatch]":
        """The loader's micro batches."""
        return (StreamBatch(batch, self._plan) for batch in self._loader.take(num_samples))


def watched(run: "Run", loader: "Loader") -> "Loader":
    """The loader, wrapped if the micro batches of the run have entries of streams."""
    import torch

    if STREAMS not in (run.hooks.call.batch_entries(config=run.config) or ()):
        return loader
    with torch.device("meta"):
        plan = run.hooks.call.build_model(run=run).plan
    return cast("Loader", StreamLoader(loader, plan))


def seen(batch: StreamBatch) -> "dict[str, Tensor]":
    """The entries of a micro batch with one row per sample; references to rows are digests of these rows."""
    own: dict[str, Tensor] = {name: entry for name, entry in batch.items() if name not in batch.plan.stream_entries}
    for axis, stream in batch.plan.streams.items():
        digests = _digests(batch, axis, stream)
        for name in (name for name in stream.indices if name in batch):
            references = batch[name]
            own[name] = references.new_tensor([digests[one] for one in references.flatten().tolist()]).view_as(
                references
            )
    return own


def _digests(batch: StreamBatch, axis: str, stream: "Stream") -> dict[int, int]:
    """A digest of the rows of each group, and of the lengths of the segments that it is in; -1 is no group."""
    context = batch.plan.context
    rows = {name: entry for name, entry in sorted(batch.items()) if axis in context.get(name, ())}
    number = next(entry.shape[context[name].index(axis)] for name, entry in rows.items())
    found = {-1: -1}
    for group in range(number // stream.group):
        digest = blake2b(digest_size=7)
        for name, entry in rows.items():
            part = entry.narrow(context[name].index(axis), group * stream.group, stream.group)
            digest.update(part.contiguous().numpy().tobytes())
        for name in (name for name in stream.lengths if name in batch):
            ends = batch[name][0].cumsum(0)
            segment = int((ends <= group * stream.group).sum())
            digest.update(str(int(batch[name][0, segment])).encode())
        found[group] = int.from_bytes(digest.digest(), "big")
    return found
