"""Compares runs under layouts with one process, for the cases of errors that other trainers report."""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from tiny_models import TABLES, of_model
from torch import Tensor

from mplug_testing.harness import EXACT, Trace, difference, logical, weights_off
from mplug_testing.parity import trained_once

Settings = dict[str, Any]

DEEPSEEK: Settings = {**of_model(TABLES["deepseek"]), "data.documents": 4}
"""With packed samples."""
GPT_OSS: Settings = {**of_model(TABLES["gpt-oss"]), "kernels.attention": None}
WHOLE_STREAM: Settings = {"parallel.tp.sequence_parallel": False}
FULL_RECOMPUTE: Settings = {"memory.recompute.mode": "full"}


def alone(settings: Settings) -> Trace:
    """The run in one process, in fp64."""
    return trained_once(settings)[0]


def ranks_of(layout: str, settings: Settings, options: Settings | None = None) -> list[Trace]:
    """The same run under a layout, with options that change nothing of what is computed."""
    return trained_once({**settings, **(options or {}), "parallel.layout": layout})


def require_equal(traces: list[Trace], reference: Trace) -> None:
    """Losses, norms, every gradient, weights, validation loss and what modules count are those of one process."""
    for found in (difference(traces, reference), weights_off(traces, reference)):
        assert not found, found
    for trace in traces:
        for counted, expected in zip(trace.statistics, reference.statistics, strict=True):
            assert counted.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(counted[name], value, rtol=EXACT, atol=0)


def gradients(traces: Sequence[Trace], shapes: Trace, pattern: str, step: int = 0) -> dict[str, Tensor]:
    """The whole gradients of the parameters that match a pattern; at least one matches, and none is zero."""
    names = [name for name in shapes.gradients[step] if fnmatchcase(name, pattern)]
    found = {name: logical([trace.gradients[step] for trace in traces], name, shapes.shapes[name]) for name in names}
    assert found, f"no trained parameter matches '{pattern}'"
    assert all(bool(gradient.any()) for gradient in found.values())
    return found


def error_of(traces: list[Trace], reference: Trace, pattern: str) -> float:
    """The largest relative error of the gradients that match a pattern, each relative to its own norm."""
    pairs = [
        (gradients(traces, reference, pattern, step), gradients([reference], reference, pattern, step))
        for step in range(len(reference.gradients))
    ]
    return max(
        float((found[name] - right).norm() / right.norm()) for found, whole in pairs for name, right in whole.items()
    )


def norm_of(parts: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(part.square().sum()) for part in parts))
