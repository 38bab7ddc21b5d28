"""Single samples for the data suite, taken out of their micro batches.

Shapes: `B` samples of a micro batch, `S` sequence length. Functions that look for a fault return it as a sentence, or
the empty string if there is none.
"""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mplug_faults import micro_batch_checks as microbatches
from mplug_testing.stream_samples import StreamBatch, seen, watched
from mplug_testing.suite import Fault, naming_failures, require

if TYPE_CHECKING:
    from torch import Tensor

    from mplug.contracts.loader import Loader
    from mplug.contracts.micro_batch import MicroBatch

IGNORED = -100
"""The label of a position without a target."""


@dataclass(frozen=True)
class Sample:
    """A sample's number in the global order, and its row of every other entry."""

    number: int
    rows: Mapping[str, Sequence[Any]]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Its S tokens."""
        return tuple(self.rows["tokens"])


def unpacked(batch: "MicroBatch") -> list[Sample]:
    """The samples of a micro batch.

    An entry with one row is repeated for all samples; entries of other lengths are left out. Of streams, a sample has
    digests of the rows that its tokens refer to.
    """
    batch = seen(batch) if isinstance(batch, StreamBatch) else batch
    numbers = batch["sample_ids"].tolist()
    columns = {
        name: tensor.expand(len(numbers), *tensor.shape[1:]).tolist()
        for name, tensor in batch.items()
        if name != "sample_ids" and tensor.dim() > 0 and len(tensor) in (1, len(numbers))
    }
    return [Sample(n, {name: rows[row] for name, rows in columns.items()}) for row, n in enumerate(numbers)]


# One micro batch.


def malformed(batch: "MicroBatch", length: int) -> str:
    """An entry that is missing, or whose shape, dtype or device violates the contract."""
    elsewhere = ((name, x.device) for name, x in batch.items() if hasattr(x, "device") and x.device.type != "cpu")
    for name, device in elsewhere:
        return f"'{name}' is on '{device}'; a loader must yield CPU tensors, and the host moves them to the device"
    return microbatches.malformed(batch, length)


def mislabelled(samples: Iterable[Sample]) -> str:
    """A label that is neither the next token nor ignored."""
    samples = list(samples)
    for sample in samples:
        labels = sample.rows["labels"]
        for place, (label, following) in enumerate(zip(labels, sample.tokens[1:], strict=False)):
            if label not in (IGNORED, following):
                return (
                    f"label {place} of sample {sample.number} is {label}, and the next token is {following}; a label "
                    f"must be the next token, or {IGNORED} for a position without a target"
                )
    if all(label == IGNORED for sample in samples for label in sample.rows["labels"]):
        return f"all labels of {len(samples)} samples are {IGNORED}, so there is no target"
    varied = [sample for sample in samples if len(set(sample.tokens)) > 1]
    if len(varied) > 1 and all(sample.rows["labels"][-1] == sample.tokens[0] for sample in varied):
        return "the last label of every sample is the sample's first token; it must be the token after the last one"
    return ""


# Several samples.


def difference(found: Sequence[Sample], expected: Sequence[Sample]) -> str:
    """The first difference between two segments of a global order."""
    for one, other in zip(found, expected, strict=False):
        if one.number != other.number:
            return f"sample {one.number} comes in the place of sample {other.number}"
        for name in other.rows:
            if one.rows.get(name) != other.rows[name]:
                return f"sample {one.number} has different {name}"
    return "" if len(found) == len(expected) else f"{len(found)} samples come instead of {len(expected)}"


def unfair(parts: Sequence[Sequence[Sample]], expected: Sequence[Sample]) -> str:
    """A fault in ranks' parts of a segment of the global order: a gap, an overlap, or other contents."""
    by_number = {sample.number: sample for sample in expected}
    readers: dict[int, int] = {}
    for rank, part in enumerate(parts):
        for sample in part:
            if sample.number in readers:
                return f"ranks {readers[sample.number]} and {rank} both read sample {sample.number}"
            if sample.number not in by_number:
                return f"rank {rank} reads sample {sample.number}, which is not among the {len(expected)} requested"
            if changed := difference([sample], [by_number[sample.number]]):
                return f"{changed} on rank {rank}"
            readers[sample.number] = rank
    for number in by_number:
        if number not in readers:
            return f"no rank reads sample {number}"
    sizes = [len(part) for part in parts]
    if len(expected) % len(parts) == 0 and len(set(sizes)) > 1:
        return f"the ranks read {sizes} samples of a batch of {len(expected)}; each reads as many as the others"
    return ""


def repeated(samples: Iterable[Sample]) -> str:
    """Two samples with the same tokens."""
    seen: dict[tuple[int, ...], int] = {}
    for sample in samples:
        if sample.tokens in seen:
            return f"samples {seen[sample.tokens]} and {sample.number} are the same"
        seen[sample.tokens] = sample.number
    return ""


def leaked(training: Iterable[Sample], validation: Iterable[Sample]) -> Sample | None:
    """A validation sample that occurs in the training text, within one sample or across the boundary of two."""
    windows = [sample.tokens for sample in training]
    length = len(windows[0])
    heads = [{window[:cut] for window in windows} for cut in range(length + 1)]
    tails = [{window[cut:] for window in windows} for cut in range(length + 1)]
    for sample in validation:
        for cut in range(length):
            left, right = sample.tokens[: length - cut], sample.tokens[length - cut :]
            if left in tails[cut] and right in heads[cut]:
                return sample
    return None


# State.


def stored(state: Any) -> "tuple[str, dict[str, Tensor]]":
    """A state as a checkpoint holds it: plain data as JSON, and tensors. Fault if the data is not plain."""
    from mplug_saving.plain_data import lift

    tensors: dict[str, Tensor] = {}
    try:
        return json.dumps(lift(state, tensors, "loader"), sort_keys=True), tensors
    except TypeError as error:
        raise Fault(str(error)) from error


def merged_state(loaders: "Sequence[Loader]") -> Any:
    """The one state that a checkpoint holds for the loaders of all ranks."""
    with naming_failures("state_dict"):
        states = [loader.state_dict() for loader in loaders]
    merge = loaders[0].merge_states
    if merge is None:
        return states[0]
    with naming_failures("merge_states"):
        return merge(states)


def kept(state: Any) -> Any:
    """A state as a checkpoint restores it."""
    from mplug_saving.plain_data import lower

    text, tensors = stored(state)
    return lower(json.loads(text), {path: tensor.clone() for path, tensor in tensors.items()})


def size_of(state: Any) -> int:
    """The size of a state in a checkpoint, in bytes."""
    text, tensors = stored(state)
    return len(text) + sum(tensor.nbytes for tensor in tensors.values())


def image(state: Any) -> str:
    """A state as text; two texts are equal if a checkpoint would hold equal states."""
    text, tensors = stored(state)
    return "\n".join((text, *(f"{path} {tensor.dtype} {tensor.tolist()}" for path, tensor in sorted(tensors.items()))))


# Reading a loader.


def first_samples(settings: Mapping[str, Any], num_samples: int) -> list[Sample]:
    """Read the first samples; called in another process."""
    from mplug.model.build import choose_device
    from mplug.training.assembly import build_loader
    from mplug_testing.harness import tiny_run

    run = tiny_run(settings)
    run.device = choose_device(run.config)
    return read(watched(run, build_loader(run, "train")), num_samples)


def taken(loader: "Loader", num_samples: int) -> "list[MicroBatch]":
    """This rank's micro batches of the next `num_samples` global samples."""
    with naming_failures(f"take({num_samples})"):
        return list(loader.take(num_samples))


def read(loader: "Loader", num_samples: int) -> list[Sample]:
    """This rank's part of the next `num_samples` global samples."""
    with naming_failures(f"take({num_samples})"):
        return [sample for batch in loader.take(num_samples) for sample in unpacked(batch)]


def refuse(fault: str, where: str = "") -> None:
    """Raise Fault if `fault` is not empty; `where` is appended to it."""
    require(not fault, f"{fault} {where}".strip())


@contextmanager
def other_random_numbers() -> Iterator[None]:
    """Set the global generators to another state in the block."""
    import numpy
    import torch

    python, arrays = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(20_011)
        yield
    random.setstate(python)
    numpy.random.set_state(arrays)
