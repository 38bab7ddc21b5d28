"""An optimizer that says `one_pass` trains as one does for which the host writes weights and zeroes gradients."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mplug.build import Parts, build
from mplug.gradients import Sinks
from mplug.run import Run
from mplug.testing.harness import Boxes, tiny_run, train_steps

SUITE = runpy.run_path(str(Path(__file__).with_name("test_suite_optimizers.py")))
Plant = Callable[..., None]
ORTHON = {"optimizer.name": "orthon"}


@pytest.fixture
def one_pass(plant: Plant) -> None:
    plant("nova-orthon", SUITE["STEP"], SUITE["ONE_PASS"])


def built(precision: str = "bf16") -> tuple[Run, Parts]:
    run = tiny_run({**ORTHON, "trainer.precision": precision})
    return run, build(run)


def forward_backward(run: Run, parts: Parts, samples: int = 8) -> torch.Tensor:
    """A copy of the arena after the gradients of the next samples."""
    run.step += 1
    parts.stepper.forward_backward(parts.train_loader.take(samples), run.step)
    return parts.model.sinks.arena.clone()


def assert_same_bits(one: dict[str, Boxes], other: dict[str, Boxes]) -> None:
    assert one.keys() == other.keys()
    for name, boxes in one.items():
        for (start, mine), (other_start, theirs) in zip(boxes, other[name], strict=True):
            assert start == other_start
            assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_has_the_same_bits_whoever_writes_the_weights(plant: Plant, precision: str) -> None:
    plant("nova-orthon")
    by_host = train_steps({**ORTHON, "trainer.precision": precision})
    plant("nova-orthon", SUITE["STEP"], SUITE["ONE_PASS"])
    in_one_pass = train_steps({**ORTHON, "trainer.precision": precision})
    assert in_one_pass.losses == by_host.losses
    assert in_one_pass.norms == by_host.norms
    for mine, theirs in zip(in_one_pass.gradients, by_host.gradients, strict=True):
        assert_same_bits(mine, theirs)
    assert_same_bits(in_one_pass.weights, by_host.weights)


@pytest.mark.usefixtures("one_pass")
def test_the_host_leaves_weights_and_gradients_to_it() -> None:
    run, parts = built()
    forward_backward(run, parts)
    step = parts.optimizer.update  # type: ignore[attr-defined]
    parts.optimizer.step = step  # type: ignore[method-assign]  # it says one_pass still, and does neither
    before = {piece.name: piece.weight.clone() for piece in parts.pieces if piece.weight is not None}
    left = parts.model.sinks.arena.clone()
    parts.stepper.update(1e-2, 0.1)
    assert all(torch.equal(before[piece.name], piece.weight) for piece in parts.pieces)
    parts.model.sinks.begin_step()
    assert torch.equal(parts.model.sinks.arena, left)


@pytest.mark.usefixtures("one_pass")
def test_gradients_without_an_update_after_them_are_forgotten() -> None:
    run, parts = built()
    forward_backward(run, parts)
    parts.stepper.update(1e-2, 0.1)
    loader = parts.train_loader.state_dict()
    once = forward_backward(run, parts)
    parts.train_loader.load_state_dict(loader)
    again = forward_backward(run, parts)
    assert bool(once.any())
    assert torch.equal(once, again)


@pytest.mark.usefixtures("one_pass")
def test_a_step_after_a_skipped_one_has_its_own_gradients_alone() -> None:
    run, parts = built()
    expected = forward_backward(run, parts)
    run, parts = built()
    parts.stepper.stop_at_nonfinite = False  # type: ignore[attr-defined]
    loader = parts.train_loader.state_dict()
    forward_backward(run, parts)
    parts.model.sinks.arena[3] = float("inf")
    assert float(parts.stepper.update(1e-2, 0.1).skipped) == 1
    parts.train_loader.load_state_dict(loader)
    assert torch.equal(forward_backward(run, parts), expected)


def test_a_step_zeroes_gradients_unless_somebody_vouches_for_it_and_for_one_step_only() -> None:
    sinks = Sinks({"w": torch.nn.Parameter(torch.ones(3))})
    for vouched, left in ((False, 0.0), (True, 7.0), (False, 0.0)):
        sinks.arena.fill_(7.0)
        sinks.zeroed |= vouched
        sinks.begin_step()
        assert sinks.arena.tolist() == [left] * 3
