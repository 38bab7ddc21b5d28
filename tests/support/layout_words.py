"""Layouts as tests write them: one string, 'tp2 parallel.tp.sequence_parallel=false'."""

from collections.abc import Iterable
from typing import Any

import pytest

from mplug.config.sources import read_assignments
from mplug_testing.harness import tiny_run

WHOLE_STREAM = "parallel.tp.sequence_parallel=false"
RECOMPUTED = "memory.recompute.mode=full"
COMPILED = "trainer.compile=aot_eager"
COMPILING = pytest.mark.filterwarnings(  # torch's own, while it traces
    "ignore:.*should not be instantiated:DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning"
)
"""The mark of tests that compile units."""


def layouts(quick: Iterable[Any], wide: Iterable[Any], mark: str = "layouts") -> list[Any]:
    """The values of a parameter: quick layouts (or settings), and those of a wide set."""
    return [*quick, *(pytest.param(one, marks=pytest.mark.wide(mark)) for one in wide)]


def under(settings: dict[str, Any], layout: str) -> tuple[int, dict[str, Any]]:
    """(the number of ranks, the settings of the run under a layout)."""
    word, *words = layout.split()
    own = {".".join(key): setting.value for key, setting in read_assignments(words).items()}
    divided = {**settings, **own, "parallel.layout": word}
    return tiny_run(divided).mesh.world_size, divided
