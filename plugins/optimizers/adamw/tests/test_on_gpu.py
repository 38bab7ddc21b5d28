"""On a GPU: the one pass in runs, beside torch's implementation and in the suite."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from mplug_adamw import AdamW
from mplug_adamw.fused import FusedAdamW
from mplug_adamw.implementation import optimizer_of
from torch import Tensor

from mplug import Optimizer, Piece, StepScalars
from mplug.model.pieces import write_weights
from mplug.run.run import Run
from mplug.training.assembly import Parts, build
from mplug_testing import DenseStep, OptimizerSuite
from mplug_testing.harness import tiny_run

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")]
SETTINGS = {"trainer.device": "cuda", "optimizer.name": "adamw"}


class Beside:
    """Makes every update with torch's implementation too, of copies of the pieces and by the same gradients."""

    needs, one_pass = "elements", True

    def __init__(self, pieces: list[Piece], own: Optimizer) -> None:
        self.pieces, self.own = pieces, own
        self.copies = [
            replace(
                piece,
                master=piece.master.clone(),
                gradient=torch.zeros_like(piece.gradient),
                weight=None if piece.weight is None else piece.weight.clone(),
            )
            for piece in pieces
        ]
        self.torchs = FusedAdamW(self.copies, AdamW.Config())

    def step(self, scalars: StepScalars) -> None:
        for piece, copy in zip(self.pieces, self.copies, strict=True):
            copy.gradient.copy_(piece.gradient)
        self.torchs.step(scalars)
        write_weights(self.copies)
        self.own.step(scalars)

    def state(self, piece: Piece) -> dict[str, Tensor]:
        return self.own.state(piece)

    def assert_alike(self) -> None:
        for piece, copy in zip(self.pieces, self.copies, strict=True):
            pairs = {"master": (piece.master, copy.master)}
            expected = self.torchs.state(copy)
            pairs |= {name: (tensor, expected[name]) for name, tensor in self.own.state(piece).items()}
            for name, (mine, theirs) in pairs.items():
                error = float((mine - theirs).norm())
                allowed = (2e-6 if name == "master" else 1e-6) * float(theirs.norm())  # powf is off by some 1e-7
                assert error <= allowed, f"{name} of {piece.name} is off by {error} (allowed: {allowed})"
            assert piece.weight is None or torch.equal(piece.weight, piece.master.bfloat16())


def built(precision: str, **changes: Any) -> tuple[Run, Parts]:
    run = tiny_run({**SETTINGS, "trainer.precision": precision, **changes})
    return run, build(run)


def steps(run: Run, parts: Parts, number: int) -> None:
    for _ in range(number):
        run.step += 1
        parts.stepper.forward_backward(parts.train_loader.take(8), run.step)
        parts.stepper.update(1e-3, 0.1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_has_the_weights_and_moments_of_torchs_implementation(precision: str) -> None:
    run, parts = built(precision)
    assert parts.optimizer.one_pass
    both = parts.stepper.optimizer = Beside(parts.pieces, parts.optimizer)
    for _ in range(20):
        steps(run, parts, 1)
        both.assert_alike()


def test_state_of_torchs_implementation_continues_in_one_pass() -> None:
    run, parts = built("bf16")
    both = Beside(parts.pieces, parts.optimizer)
    parts.stepper.optimizer = both
    steps(run, parts, 2)
    one_pass = optimizer_of(both.copies, AdamW.Config())
    assert one_pass.one_pass
    for copy in both.copies:
        for name, tensor in one_pass.state(copy).items():
            tensor.copy_(both.torchs.state(copy)[name])
    both.torchs = one_pass  # of the same copies
    steps(run, parts, 2)
    both.assert_alike()


class TestAdamWInOnePass(OptimizerSuite):
    """The whole suite but for layouts, which are tried on CPUs."""

    plugin = "adamw"
    settings = {"trainer.device": "cuda"}
    layouts = ()

    def reference(self, weight: Tensor, steps: list[DenseStep], parameter: Any, config: AdamW.Config) -> Tensor:
        torchs = torch.nn.Parameter(weight.clone())
        adamw = torch.optim.AdamW([torchs], betas=(config.beta1, config.beta2), eps=config.eps, foreach=False)
        for gradient, lr, decay in steps:
            torchs.grad = gradient
            adamw.param_groups[0].update(lr=lr, weight_decay=decay)
            adamw.step()
        return torchs.detach()

    def test_it_says_one_pass(self) -> None:
        assert self._bench().optimizer.one_pass
