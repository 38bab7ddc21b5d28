"""The wider dtype in which values are summed, and the dtypes of precisions for plugins that were written for 0.1."""

from collections.abc import Iterator, Mapping

import torch

from mplug.errors import UsageError
from mplug.registry.entry_points import Registry
from mplug.registry.precisions import KIND, precision_named


class _DtypesByName(Mapping[str, torch.dtype]):
    """`trainer.precision` -> the dtype of weights, for every installed precision with its default options.

    A lookup imports the precision's plugin. `run.precision` has all dtypes of a run, with the options of its config.
    """

    def __getitem__(self, word: str) -> torch.dtype:
        try:
            return precision_named(word).weight_dtype
        except UsageError as error:
            raise KeyError(f"{word}: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(Registry().names(KIND))

    def __len__(self) -> int:
        return len(Registry().names(KIND))


DTYPES: Mapping[str, torch.dtype] = _DtypesByName()
"""For plugins written for 0.1: `trainer.precision` -> the dtype of weights. Use `run.precision` instead."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed: at least fp32."""
    return torch.promote_types(dtype, torch.float32)
