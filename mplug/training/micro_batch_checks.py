"""Check a micro batch against the contract of loaders (`mplug.contracts.Loader`); each fault is a sentence.

`B` samples of a micro batch, `S` sequence length. The check runs while the values are on the CPU: on a GPU, a token
without a row in the embedding ends the process by a device assertion.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from mplug.contracts import MicroBatch

SHAPES = {"tokens": "[B, S]", "labels": "[B, S]", "positions": "[1 or B, S]", "sample_ids": "[B]"}
"""The entries of every micro batch."""


def malformed(batch: "MicroBatch", length: int) -> str:
    """An entry that is missing, or has another shape or type than the contract says; '' if there is none."""
    from torch import Tensor  # the suite's module imports without torch

    if not isinstance(batch, dict):
        return f"a micro batch is a dict of tensors, and this one is a {type(batch).__name__}"
    for name, shape in SHAPES.items():
        if name not in batch:
            return f"a micro batch has no '{name}' {shape}"
    for name, entry in batch.items():
        if not isinstance(entry, Tensor):
            return f"'{name}' is a {type(entry).__name__}; every entry is a tensor"
    size = batch["sample_ids"].numel()
    allowed: dict[str, list[tuple[int, ...]]] = {"sample_ids": [(size,)], "positions": [(1, length), (size, length)]}
    for name, shape in SHAPES.items():
        tensor = batch[name]
        if tuple(tensor.shape) not in allowed.get(name, [(size, length)]):
            return f"'{name}' has shape {tuple(tensor.shape)}; it is {shape}, here with B={size} and S={length}"
        if tensor.is_floating_point() or tensor.is_complex() or not tensor.dtype.is_signed:
            return f"'{name}' is {tensor.dtype}; it holds signed integers"
    if batch["labels"].dtype.itemsize != 8:
        return f"'labels' are {batch['labels'].dtype}; a loss takes int64"
    return _unmeasured(batch["document_lengths"], size, length) if "document_lengths" in batch else ""


def _unmeasured(lengths: "Tensor", size: int, length: int) -> str:
    """A fault of the document lengths of samples of `length` tokens; '' if there is none."""
    told = f"'document_lengths' {tuple(lengths.shape)}, {lengths.dtype},"
    if lengths.dim() != 2 or len(lengths) != size or lengths.is_floating_point() or lengths.dtype.itemsize != 8:
        return f"{told} must be [B, M] and int64, here with B={size}"
    if lengths.device.type != "cpu":
        return ""
    if bool((lengths < 0).any()):
        return f"{told} hold {int(lengths.min())}; a document has tokens, and zeros fill up"
    wrong = [total for total in lengths.sum(dim=1).tolist() if total != length]
    return f"{told} add up to {wrong[0]} in a sample of {length} tokens; every token is in a document" if wrong else ""


def out_of_range(batch: "MicroBatch", vocab_size: int) -> str:
    """A token, label or position that has no row in its table, or a number that is not finite; '' if there is none.

    Entries on another device than the CPU are not checked: the CPU would wait for the device.
    """
    from mplug.nn.loss import IGNORED  # imports torch

    length = batch["tokens"].shape[1]
    ends = {
        "tokens": (vocab_size, "the loader's vocab_size"),
        "labels": (vocab_size, "the loader's vocab_size"),
        "positions": (length, "the sequence length"),
    }
    for name, values in batch.items():
        if values.device.type != "cpu" or not values.numel():
            continue
        if values.is_floating_point() and not all(bool(bound.isfinite()) for bound in values.aminmax()):
            row = next((row for row, one in enumerate(values) if not bool(one.isfinite().all())), 0)
            return f"'{name}' holds a number that is not finite{_in_sample(batch, values, row)}"
        if name in ends:
            end, bound = ends[name]
            held = values.masked_fill(values == IGNORED, 0) if name == "labels" else values
            if not 0 <= int(held.min()) <= int(held.max()) < end:
                wrong = ((held < 0) | (held >= end)).nonzero()[0].tolist()
                where = _in_sample(batch, values, wrong[0])
                return (
                    f"'{name}' holds {int(values[tuple(wrong)])}{where}; they are 0 to {end - 1}, for {bound} is {end}"
                )
    return ""


def _in_sample(batch: "MicroBatch", values: "Tensor", row: int) -> str:
    numbers = batch["sample_ids"]
    return f" in sample {int(numbers[row])}" if values.dim() and len(values) == len(numbers) else ""
