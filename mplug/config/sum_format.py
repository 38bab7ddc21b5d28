"""The type of a config field that names the number format in which gradients are communicated and summed."""

from typing import Annotated

from pydantic import AfterValidator

from mplug.errors import listed, suggest
from mplug.precisions.precision import SUM_FORMATS


def _known(word: str) -> str:
    if word not in SUM_FORMATS:
        raise ValueError(
            f"'{word}' is no format in which gradients are summed{suggest(word, SUM_FORMATS)} (formats: "
            f"{listed(SUM_FORMATS)})"
        )
    return word


SumFormat = Annotated[str, AfterValidator(_known)]
"""A format of sums of gradients over ranks, such as 'fp32' or 'bf16'. `mplug.rounding_of_sums` and
`run.precision.sum_dtype` say what it means in a run."""
