"""Lion over pieces: mplug's suite against the paper's algorithm in fp64."""

import pytest
import torch
from mplug_lion import Lion, foreach
from torch import Tensor

from mplug import Parameter
from mplug_testing import DenseStep, OptimizerSuite, dense


@pytest.mark.wide("reshard", tests=["test_a_layout_gives_the_weights_of_one_process"], quick=["tp2"])
class TestLion(OptimizerSuite):
    plugin = "lion"
    layouts = ("tp2", "zero2")

    def reference(self, weight: Tensor, steps: list[DenseStep], parameter: Parameter, config: Lion.Config) -> Tensor:
        """Algorithm 2 of arXiv 2302.06675."""
        momentum = torch.zeros_like(weight)
        for gradient, lr, decay in steps:
            direction = torch.sign(config.beta1 * momentum + (1 - config.beta1) * gradient)
            weight = weight - lr * (direction + decay * weight)
            momentum = config.beta2 * momentum + (1 - config.beta2) * gradient
        return weight


@pytest.mark.wide("layouts")
class TestLionUnderEveryStrategy(TestLion):
    layouts = None


class TestWithOtherRates(TestLion):
    """And pieces that are updated a few at a time are updated alike."""

    settings = {"optimizer.beta1": 0.3, "optimizer.beta2": 0.4}
    layouts = ()

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(foreach, "GROUP", 300)


@pytest.mark.gpu
class TestOnAGPU(TestLion):
    settings = {"trainer.device": "cuda"}
    layouts = ()


def test_groups_hold_every_piece_once_in_order_within_the_limit() -> None:
    pieces = dense.make_pieces("cpu")
    found = list(foreach.groups(pieces, 300))
    assert [piece.name for group in found for piece in group] == [piece.name for piece in pieces]
    sizes = [sum(piece.master.numel() for piece in group) for group in found]
    assert 1 < len(found) < len(pieces)
    assert all(size <= 300 or len(group) == 1 for size, group in zip(sizes, found, strict=True))
