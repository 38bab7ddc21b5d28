"""Samples as the data suite looks at them: one by one, whatever micro batches they came in.

Shapes: `B` samples of a micro batch, `S` sequence length. Functions that look for a fault return it as a sentence, the
empty string where there is none.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mplug.testing.suite import Fault, naming_failures

if TYPE_CHECKING:
    from torch import Tensor

    from mplug.contracts import Loader, MicroBatch

IGNORED = -100
"""The label of a position without a target."""
SHAPES = {"tokens": "[B, S]", "labels": "[B, S]", "positions": "[1 or B, S]", "sample_ids": "[B]"}
"""What every micro batch has."""


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
    """The samples of a micro batch; an entry with one row for all is repeated, one with neither is not theirs."""
    numbers = batch["sample_ids"].tolist()
    columns = {
        name: tensor.expand(len(numbers), *tensor.shape[1:]).tolist()
        for name, tensor in batch.items()
        if name != "sample_ids" and tensor.dim() > 0 and len(tensor) in (1, len(numbers))
    }
    return [Sample(n, {name: rows[row] for name, rows in columns.items()}) for row, n in enumerate(numbers)]


# One micro batch.


def malformed(batch: "MicroBatch", length: int) -> str:
    """An entry that is missing, or has another shape, type or device than the contract says."""
    for name, shape in SHAPES.items():
        if name not in batch:
            return f"a micro batch has no '{name}' {shape}"
    size = len(batch["sample_ids"])
    allowed: dict[str, list[tuple[int, ...]]] = {"sample_ids": [(size,)], "positions": [(1, length), (size, length)]}
    for name, shape in SHAPES.items():
        tensor = batch[name]
        if tuple(tensor.shape) not in allowed.get(name, [(size, length)]):
            return f"'{name}' has shape {tuple(tensor.shape)}; it is {shape}, here with B={size} and S={length}"
        if tensor.is_floating_point() or tensor.is_complex() or not tensor.dtype.is_signed:
            return f"'{name}' is {tensor.dtype}; it holds signed integers"
        if tensor.device.type != "cpu":
            return f"'{name}' is on '{tensor.device}'; a loader's micro batches are on the CPU, and the host moves them"
    if batch["labels"].dtype.itemsize != 8:
        return f"'labels' are {batch['labels'].dtype}; a loss takes int64"
    return _unmeasured(batch["document_lengths"], size, length) if "document_lengths" in batch else ""


def _unmeasured(lengths: "Tensor", size: int, length: int) -> str:
    """Lengths of documents that are not those of samples of `length` tokens."""
    told = f"'document_lengths' {tuple(lengths.shape)}, {lengths.dtype},"
    if lengths.dim() != 2 or len(lengths) != size or lengths.is_floating_point() or lengths.dtype.itemsize != 8:
        return f"{told} must be [B, M] and int64, here with B={size}"
    if bool((lengths < 0).any()):
        return f"{told} hold {int(lengths.min())}; a document has tokens, and zeros fill up"
    wrong = [total for total in lengths.sum(dim=1).tolist() if total != length]
    return f"{told} add up to {wrong[0]} in a sample of {length} tokens; every token is in a document" if wrong else ""


def out_of_range(batch: "MicroBatch", vocab_size: int) -> str:
    """A token, label or position that has no row in its table."""
    tokens, labels, positions = batch["tokens"], batch["labels"], batch["positions"]
    length = tokens.shape[1]
    for name, values, end, bound in (
        ("tokens", tokens, vocab_size, "the loader's vocab_size"),
        ("labels", labels[labels != IGNORED], vocab_size, "the loader's vocab_size"),
        ("positions", positions, length, "the sequence length"),
    ):
        wrong = values[(values < 0) | (values >= end)]
        if wrong.numel():
            return f"'{name}' holds {int(wrong[0])}; they are 0 to {end - 1}, for {bound} is {end}"
    return ""


def mislabelled(samples: Iterable[Sample]) -> str:
    """A label that is neither the next token nor ignored."""
    samples = list(samples)
    for sample in samples:
        labels = sample.rows["labels"]
        for place, (label, following) in enumerate(zip(labels, sample.tokens[1:], strict=False)):
            if label not in (IGNORED, following):
                return (
                    f"label {place} of sample {sample.number} is {label}, and the token after it is {following}; "
                    f"labels are the tokens shifted by one, or {IGNORED} where there is no target"
                )
    if all(label == IGNORED for sample in samples for label in sample.rows["labels"]):
        return f"no label of {len(samples)} samples is a target: all are {IGNORED}"
    varied = [sample for sample in samples if len(set(sample.tokens)) > 1]
    if len(varied) > 1 and all(sample.rows["labels"][-1] == sample.tokens[0] for sample in varied):
        return "the last label of every sample is its own first token; it must be the one after the last"
    return ""


# Several samples.


def difference(found: Sequence[Sample], expected: Sequence[Sample]) -> str:
    """The first thing in which two stretches of a global order differ."""
    for one, other in zip(found, expected, strict=False):
        if one.number != other.number:
            return f"sample {one.number} comes where sample {other.number} belongs"
        for name in other.rows:
            if one.rows.get(name) != other.rows[name]:
                return f"sample {one.number} has other {name}"
    return "" if len(found) == len(expected) else f"{len(found)} samples come where {len(expected)} belong"


def unfair(parts: Sequence[Sequence[Sample]], expected: Sequence[Sample]) -> str:
    """What is wrong with ranks' parts of a stretch of the global order: a gap, an overlap, another content."""
    wanted = {sample.number: sample for sample in expected}
    readers: dict[int, int] = {}
    for rank, part in enumerate(parts):
        for sample in part:
            if sample.number in readers:
                return f"ranks {readers[sample.number]} and {rank} both read sample {sample.number}"
            if sample.number not in wanted:
                return f"rank {rank} reads sample {sample.number}, which is not among the {len(expected)} taken"
            if changed := difference([sample], [wanted[sample.number]]):
                return f"{changed} on rank {rank}"
            readers[sample.number] = rank
    for number in wanted:
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
    """A validation sample that stands in the training text: in one sample, or over the border of two."""
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
    """What a checkpoint holds of a state: its plain data as JSON, and its tensors. Fault where it is not plain."""
    from mplug.plain import lift

    tensors: dict[str, Tensor] = {}
    try:
        return json.dumps(lift(state, tensors, "loader"), sort_keys=True), tensors
    except TypeError as error:
        raise Fault(str(error)) from error


def merged_state(loaders: "Sequence[Loader]") -> Any:
    """The state of all ranks' loaders that a checkpoint holds."""
    with naming_failures("state_dict"):
        states = [loader.state_dict() for loader in loaders]
    merge = getattr(loaders[0], "merge_states", None)
    if merge is None:
        return states[0]
    with naming_failures("merge_states"):
        return merge(states)


def kept(state: Any) -> Any:
    """A state as a checkpoint gives it back."""
    from mplug.plain import lower

    text, tensors = stored(state)
    return lower(json.loads(text), {path: tensor.clone() for path, tensor in tensors.items()})


def size_of(state: Any) -> int:
    """Bytes of a state in a checkpoint."""
    text, tensors = stored(state)
    return len(text) + sum(tensor.nbytes for tensor in tensors.values())


def image(state: Any) -> str:
    """A state as text: two are the same where a checkpoint would hold the same."""
    text, tensors = stored(state)
    return "\n".join((text, *(f"{path} {tensor.dtype} {tensor.tolist()}" for path, tensor in sorted(tensors.items()))))
