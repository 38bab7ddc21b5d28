"""Runs under layouts, each written as on a command line: 'tp2pp2 parallel.tp.sequence_parallel=false'."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from mplug.config.sources import read_assignments
from mplug.errors import UsageError
from mplug.model.build import build_model
from mplug_testing import run_workers
from mplug_testing.harness import difference, tiny_run, train_steps
from mplug_testing.parity import trained_once


def under(layout: str, settings: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Settings with those that follow a layout."""
    word, *assignments = layout.split() or [""]
    options = {".".join(key): setting.value for key, setting in read_assignments(assignments).items()}
    return {**settings, **options, "parallel.layout": word}


def nothing() -> None:
    """Change nothing before a run."""


def difference_of(layout: str, settings: Mapping[str, Any], before: Callable[[], None] = nothing) -> str:
    """The difference of a run from one eager process, where each rank first calls `before`; empty: they are equal."""
    divided, only_how = under(layout, settings), ("parallel.", "trainer.compile", "memory.")
    alone = {name: value for name, value in divided.items() if not name.startswith(only_how)}
    ranks = run_workers(tiny_run(divided).mesh.world_size, train_steps, divided, before)
    return difference(ranks, trained_once(alone)[0])


def assert_refused(layout: str, settings: Mapping[str, Any], *words: str) -> None:
    """The run is refused before it starts any process, with these words."""
    with pytest.raises(UsageError) as caught:
        build_model(tiny_run(under(layout, settings)))
    assert [one for one in words if one not in str(caught.value)] == [], str(caught.value)
