"""An optimizer that says `one_pass` trains as one does for which the host writes weights."""

from collections.abc import Callable

import pytest
import torch
from one_pass import ONE_PASS

from mplug.run.run import Run
from mplug.training.assembly import Parts, build
from mplug_testing.harness import Boxes, tiny_run, train_steps

Plant = Callable[..., None]
ORTHON = {"optimizer.name": "orthon"}


@pytest.fixture
def one_pass(plant: Plant) -> None:
    plant("nova-orthon", *ONE_PASS)


def built(precision: str = "bf16") -> tuple[Run, Parts]:
    run = tiny_run({**ORTHON, "trainer.precision": precision})
    return run, build(run)


def assert_same_bits(one: dict[str, Boxes], other: dict[str, Boxes]) -> None:
    assert one.keys() == other.keys()
    for name, boxes in one.items():
        for (start, mine), (other_start, theirs) in zip(boxes, other[name], strict=True):
            assert start == other_start
            assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.wide("precision", quick=["bf16"])
def test_a_run_has_the_same_bits_whoever_writes_the_weights(plant: Plant, precision: str) -> None:
    plant("nova-orthon")
    by_host = train_steps({**ORTHON, "trainer.precision": precision})
    plant("nova-orthon", *ONE_PASS)
    in_one_pass = train_steps({**ORTHON, "trainer.precision": precision})
    assert in_one_pass.losses == by_host.losses
    assert in_one_pass.norms == by_host.norms
    for mine, theirs in zip(in_one_pass.gradients, by_host.gradients, strict=True):
        assert_same_bits(mine, theirs)
    assert_same_bits(in_one_pass.weights, by_host.weights)


@pytest.mark.usefixtures("one_pass")
def test_the_host_leaves_weights_to_it() -> None:
    run, parts = built()
    run.step = 1
    parts.stepper.forward_backward(parts.train_loader.take(8), run.step)
    step = parts.optimizer.update  # type: ignore[attr-defined]
    parts.optimizer.step = step  # type: ignore[method-assign]  # it says one_pass still, and writes none
    before = {piece.name: piece.weight.clone() for piece in parts.pieces if piece.weight is not None}
    parts.stepper.update(1e-2, 0.1)
    assert all(torch.equal(before[piece.name], piece.weight) for piece in parts.pieces)
