"""A rank of a run that begins with weights of other software; this module imports none of that software."""

from typing import Any

from published import resolved

from mplug.run.prepare import prepare
from mplug.training.assembly import build
from mplug_pretrained.weights import load_weights, newest_pretrained
from mplug_testing.harness import as_rank, owned_values


def begun(settings: dict[str, Any]) -> dict[str, Any]:
    """Be one rank of a run that begins: the values of its parameters."""
    run = as_rank(prepare(resolved(settings)))
    run.device = "cpu"
    parts, path = build(run), newest_pretrained(run)
    assert path is not None
    load_weights(run, parts.model, parts.pieces, path)
    return owned_values(run, parts)
