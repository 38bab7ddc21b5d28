"""Runs with workers are those of the simulation in one process, in fp64."""

from functools import cache
from typing import Any

import pytest
import tiny_models
import torch
from diloco_simulation import STREAMED, Record, simulated, trained_rank

from mplug_testing import run_workers

EXPERTS: dict[str, Any] = {**tiny_models.EXPERTS, "model.vocab_size": 320}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "at once": ("diloco2", {"parallel.diloco.every": 3, "trainer.steps": 20}),
    "streamed": ("diloco2", STREAMED),
    "four workers": ("diloco4", STREAMED),
    "dp": ("diloco2dp2", STREAMED),
    "zero": ("diloco2zero2", STREAMED),
    "zero of gradients": ("diloco2zero2", {**STREAMED, "parallel.zero.stage": 2}),
    "fsdp": ("diloco2fsdp2", STREAMED),
    "tp": ("diloco2tp2", STREAMED),
    "pp": ("diloco2pp2", STREAMED),
    "pp, tied": ("diloco2pp2", {**STREAMED, "model.tie_embeddings": True}),
    "cp": ("diloco2cp2", STREAMED),
    "ep": ("diloco2dp2ep2", {**STREAMED, **EXPERTS}),
    "muon": ("diloco2zero2", {**STREAMED, "optimizer.name": "muon", "model.vocab_size": 320}),
    "frozen": ("diloco2pp2", {**STREAMED, "model.frozen": ["embedding", "blocks.0"]}),
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
