"""Runs with workers are those of the simulation in one process, in fp64."""

from functools import cache
from typing import Any

import pytest
import tiny_models
import torch
from diloco_simulation import Record, simulated, trained_rank

from mplug_testing import run_workers

OUTER: dict[str, Any] = {
    "parallel.diloco.every": 4,
    "parallel.diloco.fragments": 2,
    "parallel.diloco.delay": 1,
    "parallel.diloco.alpha": 0.25,
    "trainer.steps": 9,
}
EXPERTS: dict[str, Any] = {**tiny_models.EXPERTS, "model.vocab_size": 320}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "at once": ("diloco2", {"parallel.diloco.every": 3, "trainer.steps": 20}),
    "streamed": ("diloco2", OUTER),
    "four workers": ("diloco4", OUTER),
    "dp": ("diloco2dp2", OUTER),
    "zero": ("diloco2zero2", OUTER),
    "zero of gradients": ("diloco2zero2", {**OUTER, "parallel.zero.stage": 2}),
    "fsdp": ("diloco2fsdp2", OUTER),
    "tp": ("diloco2tp2", OUTER),
    "pp": ("diloco2pp2", OUTER),
    "pp, tied": ("diloco2pp2", {**OUTER, "model.tie_embeddings": True}),
    "cp": ("diloco2cp2", OUTER),
    "ep": ("diloco2dp2ep2", {**OUTER, **EXPERTS}),
    "muon": ("diloco2zero2", {**OUTER, "optimizer.name": "muon", "model.vocab_size": 320}),
    "frozen": ("diloco2pp2", {**OUTER, "model.frozen": ["embedding", "blocks.0"]}),
}


@cache
def reference(key: str) -> Record:
    layout, settings = CASES[key]
    return simulated({**settings}, int(layout[len("diloco")]))


def whole(parts: list[Any], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    found = torch.full(shape, float("nan"), dtype=torch.float64)
    for boxes in parts:
        for start, values in boxes.get(name, []):
            index = tuple(
                slice(s, s + n) for s, n in zip(start[len(start) - values.dim() :], values.shape, strict=True)
            )
            found[(*start[: len(start) - values.dim()], *index)] = values
    return found


@pytest.mark.wide("layouts", quick=["at once"])
@pytest.mark.parametrize("key", CASES)
def test_workers_are_those_of_the_simulation_in_one_process(key: str) -> None:
    layout, settings = CASES[key]
    ranks = run_workers(2 if layout in ("diloco2",) else 4, trained_rank, {**settings, "parallel.layout": layout})
    expected = reference(key)
    for record, _ in ranks:
        assert record.losses == pytest.approx(expected.losses, rel=1e-10)
        assert record.norms == pytest.approx(expected.norms, rel=1e-10)
        assert record.val_losses == pytest.approx(expected.val_losses, rel=1e-10)
        assert record.tokens == expected.tokens
    shapes = ranks[0][1]
    for name, weights in expected.global_weights.items():
        found = whole([record.global_weights for record, _ in ranks], name, shapes[name])
        torch.testing.assert_close(found, weights, rtol=0, atol=1e-9)
        local = expected.local_weights[name]
        found = whole([record.local_weights for record, _ in ranks], name, tuple(local.shape))
        torch.testing.assert_close(found, local, rtol=0, atol=1e-9)


def test_the_workers_of_the_simulation_differ_between_exchanges() -> None:
    """Otherwise the test above would not see a gradient that all ranks sum."""
    local = simulated({"parallel.diloco.every": 3, "trainer.steps": 20}, 2, steps=2).local_weights
    assert max(float((one[0] - one[1]).abs().max()) for one in local.values()) > 1e-4
