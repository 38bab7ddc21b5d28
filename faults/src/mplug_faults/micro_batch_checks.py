"""Check a micro batch against the contract of loaders (`mplug.contracts.loader.Loader`). Each check returns a sentence.

`B` samples of a micro batch, `S` sequence length. The check runs while the values are on the CPU: on a GPU, a token
without a row in the embedding ends the process by a device assertion.
"""

from typing import TYPE_CHECKING

from mplug.contracts.micro_batch import DOCUMENTS, IGNORED, LOSS_WEIGHTS

if TYPE_CHECKING:
    from torch import Tensor

    from mplug.contracts.micro_batch import MicroBatch

SHAPES = {"tokens": "[B, S]", "labels": "[B, S]", "positions": "[1 or B, S]", "sample_ids": "[B]"}
"""The entries of every micro batch."""


def malformed(batch: "MicroBatch", length: int) -> str:
    """A sentence about an entry that is missing, or whose shape or type breaks the contract; '' if there is none."""
    from torch import Tensor  # the suite's module imports without torch

    if not isinstance(batch, dict):
        return f"the micro batch is a {type(batch).__name__}; it must be a dict of tensors"
    for name, shape in SHAPES.items():
        if name not in batch:
            return f"the micro batch has no entry '{name}' {shape}"
    for name, entry in batch.items():
        if not isinstance(entry, Tensor):
            return f"'{name}' is a {type(entry).__name__}; every entry must be a tensor"
    size = batch["sample_ids"].numel()
    allowed: dict[str, list[tuple[int, ...]]] = {"sample_ids": [(size,)], "positions": [(1, length), (size, length)]}
    for name, shape in SHAPES.items():
        tensor = batch[name]
        if tuple(tensor.shape) not in allowed.get(name, [(size, length)]):
            return f"'{name}' has shape {tuple(tensor.shape)}; it must be {shape}, here with B={size} and S={length}"
        if tensor.is_floating_point() or tensor.is_complex() or not tensor.dtype.is_signed:
            return f"'{name}' has dtype {tensor.dtype}; it must hold signed integers"
    if batch["labels"].dtype.itemsize != 8:
        return f"'labels' has dtype {batch['labels'].dtype}; a loss takes int64"
    if LOSS_WEIGHTS in batch and (fault := _weight_fault(batch[LOSS_WEIGHTS], size, length)):
        return fault
    return _length_fault(batch[DOCUMENTS], size, length) if DOCUMENTS in batch else ""


def _weight_fault(weights: "Tensor", size: int, length: int) -> str:
    """A fault of the weights of losses of samples of `length` tokens; '' if there is none."""
    name = f"'{LOSS_WEIGHTS}' {tuple(weights.shape)} of {weights.dtype}"
    if tuple(weights.shape) != (size, length) or not weights.is_floating_point():
        return f"{name} must be [B, S] of floating-point numbers, here with B={size} and S={length}"
    if weights.device.type == "cpu" and bool((weights < 0).any()):
        return f"{name} holds {float(weights.min())}; a weight is at least 0"
    return ""


def _length_fault(lengths: "Tensor", size: int, length: int) -> str:
    """A fault of the document lengths of samples of `length` tokens; '' if there is none."""
    name = f"'{DOCUMENTS}' {tuple(lengths.shape)} of {lengths.dtype}"
    if lengths.dim() != 2 or len(lengths) != size or lengths.is_floating_point() or lengths.dtype.itemsize != 8:
        return f"{name} must be [B, M] of int64, here with B={size}"
    if lengths.device.type != "cpu":
        return ""
    if bool((lengths < 0).any()):
        return f"{name} holds {int(lengths.min())}; a length is positive, or 0 for padding"
    totals = [total for total in lengths.sum(dim=1).tolist() if total != length]
    return f"{name} sums to {totals[0]} in a sample of {length} tokens; it must sum to {length}" if totals else ""


def out_of_range(batch: "MicroBatch", vocab_size: int) -> str:
    """A sentence about a token, label or position out of range, or a value that is not finite; '' if there is none.

    Entries on another device than the CPU are not checked: the CPU would wait for the device.
    """
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
            row = next((row for row, sample in enumerate(values) if not bool(sample.isfinite().all())), 0)
            return f"'{name}' holds a value that is not finite{_sample_of(batch, values, row)}"
        if name in ends:
            end, bound = ends[name]
            checked = values.masked_fill(values == IGNORED, 0) if name == "labels" else values
            if not 0 <= int(checked.min()) <= int(checked.max()) < end:
                index = ((checked < 0) | (checked >= end)).nonzero()[0].tolist()
                sample = _sample_of(batch, values, index[0])
                return (
                    f"'{name}' holds {int(values[tuple(index)])}{sample}; values must be 0 to {end - 1}, because "
                    f"{bound} is {end}"
                )
    return ""


def _sample_of(batch: "MicroBatch", values: "Tensor", row: int) -> str:
    numbers = batch["sample_ids"]
    return f" in sample {int(numbers[row])}" if values.dim() and len(values) == len(numbers) else ""
