"""Optimizer states in the memory of the CPU (`optimizer.offload`): the same results bit by bit, saved and counted.

The set `pairs` compares further layouts.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from mplug_explain.command import command as explain
from tiny_runs import position_of
from torch import Tensor

from mplug import UsageError
from mplug.contracts.optimizer import ShapedState, tensors_of
from mplug.layout.placement import Placement
from mplug.model.build import build_model
from mplug.training.assembly import Parts, build
from mplug_estimates import measure_bytes
from mplug_saving.folder import newest
from mplug_testing.harness import tiny_run
from mplug_updates.offloaded_optimizer import OffloadedOptimizer, chunks_of

SMALL: dict[str, Any] = {"optimizer.offload": {"chunk": 10_000}}
"""Several chunks of the tiny run."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer.name": "adamw"},
    "adamw bf16": {"optimizer.name": "adamw", "optimizer.moments": "bf16"},
    "adamw 8-bit": {"optimizer.name": "adamw", "optimizer.moments": "8bit"},
    "muon": {"optimizer.name": "muon"},
    "adafactor": {"optimizer.name": "adafactor", "optimizer.beta1": 0.9},
    "soap": {"optimizer.name": "soap"},
    "lion": {"optimizer.name": "lion"},
    "sgd": {"optimizer.name": "sgd"},
    "schedulefree": {"optimizer.name": "schedulefree"},
    "average": {"optimizer.name": "adamw", "optimizer.average": {"decay": 0.5}},
    "groups": {"optimizer.name": "muon", "optimizer.groups": [{"match": "blocks.1", "optimizer": {"name": "adamw"}}]},
}


def trained(settings: dict[str, Any], steps: int) -> Parts:
    parts = build(tiny_run(settings))
    for step in range(1, steps + 1):
        parts.stepper.forward_backward(parts.train_loader.take(8), step)
        parts.stepper.update(0.01, 0.1)
    return parts


def everything(parts: Parts) -> dict[str, Tensor]:
    """All masters and states."""
    found = {piece.name: piece.master for piece in parts.pieces}
    for piece in parts.pieces:
        found |= {f"{piece.name}/{name}": one for name, one in tensors_of(parts.optimizer.state(piece)).items()}
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.wide("layouts", quick=["adamw 8-bit", "groups"])
def test_masters_and_states_are_those_on_the_device_bit_by_bit(name: str) -> None:
    kept, offloaded = (trained({**OPTIMIZERS[name], **more}, 3) for more in ({}, SMALL))
    assert isinstance(offloaded.optimizer, OffloadedOptimizer)
    own, expected = everything(offloaded), everything(kept)
    assert own.keys() == expected.keys()
    for key, value in own.items():
        assert torch.equal(value, expected[key]), key


def test_states_have_no_memory_on_the_device_between_steps() -> None:
    """But for the masters, the storages of the optimizers' own tensors are empty."""
    parts = trained({**OPTIMIZERS["muon"], **SMALL}, 1)
    assert isinstance(parts.optimizer, OffloadedOptimizer)
    chunks = parts.optimizer._chunks
    assert len(chunks) > 4
    for chunk in chunks:
        for piece in chunk.part.pieces:
            for one in tensors_of(chunk.part.optimizer.state(piece)).values():
                assert one.untyped_storage().nbytes() == 0
            for held in parts.optimizer.state(piece).values():
                assert isinstance(held, ShapedState) or held.untyped_storage().nbytes() > 0


def test_chunks_are_neighbours_of_the_given_size() -> None:
    placements: dict[str, Placement] = build_model(tiny_run({})).placements
    found = chunks_of(placements, 20_000)
    assert list(found.values()) == sorted(found.values())
    for number in set(found.values()):
        sizes = [placements[name].numel for name, chunk in found.items() if chunk == number]
        assert sum(sizes) <= 20_000 + max(sizes)


# Checkpoints.


@pytest.mark.parametrize("first", [True, False], ids=["then on the device", "then offloaded"])
@pytest.mark.wide("reshard")
def test_a_checkpoint_resumes_with_and_without_offload(first: bool, tmp_path: Path) -> None:
    settings = [OPTIMIZERS["soap"], {**OPTIMIZERS["soap"], **SMALL}]
    saved = position_of(settings[first], tmp_path)
    for step in (1, 2):
        saved.run.step = step
        saved.parts.stepper.forward_backward(saved.parts.train_loader.take(8), step)
        saved.parts.stepper.update(0.01, 0.1)
    saved.save()
    other = position_of(settings[not first], tmp_path)
    path = newest(tmp_path / "checkpoints")
    assert path is not None
    other.load(other.choose(path))
    for name, value in everything(saved.parts).items():
        assert torch.equal(value, everything(other.parts)[name]), name


# Reports and refusals.


def test_memory_is_counted_where_it_is() -> None:
    run = tiny_run({**OPTIMIZERS["lion"], **SMALL})
    model = build_model(run)
    elements = sum(placement.numel for placement in model.placements.values())
    found = measure_bytes(run, model)
    assert found["optimizer state in CPU memory"] == 4 * elements
    assert "optimizer state" not in found
    assert 3 * 4 * 10_000 * 0.5 < found["chunks of optimizer state"] < 4 * elements


def test_explain_shows_the_memory_of_both() -> None:
    result = CliRunner().invoke(explain, ["--model", "gpt", "--set", "optimizer.offload={}"])
    assert result.exit_code == 0, result.output
    assert "optimizer state in CPU memory" in result.output


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"parallel.layout": "fsdp2", "parallel.fsdp.cpu_offload": True}, "are in CPU memory already"),
        ({"trainer.graphs": True}, "graph"),
        ({"optimizer.offload": {"chunk": 0}}, r"optimizer\.offload\.chunk"),
        ({"optimizer.offload": {"chunks": 1}}, r"optimizer\.offload\.chunks"),
    ],
    ids=str,
)
def test_what_offloads_nothing_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        build_model(tiny_run({**SMALL, **settings}))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adamw", "adamw 8-bit", "muon", "average"])
def test_copies_beside_the_update_change_no_bit_on_a_gpu(name: str) -> None:
    on_gpu = {"trainer.device": "cuda", "trainer.precision": "bf16"}
    kept, offloaded = (trained({**OPTIMIZERS[name], **on_gpu, **more}, 6) for more in ({}, SMALL))
    assert isinstance(offloaded.optimizer, OffloadedOptimizer)
    own, expected = everything(offloaded), everything(kept)
    for key, value in own.items():
        assert torch.equal(value.cpu(), expected[key].cpu()), key
        assert value.device.type == ("cpu" if "/" in key else "cuda"), key
