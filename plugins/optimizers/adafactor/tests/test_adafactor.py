"""Adafactor over pieces: mplug's suite against the transformers library in fp64."""

from typing import Any

import pytest
import torch
from mplug_adafactor import Adafactor
from torch import Tensor

from mplug import Parameter, ShapedState
from mplug_testing import DenseStep, OptimizerSuite, dense
from mplug_testing.harness import tiny_run

pytest.importorskip("transformers")


@pytest.mark.wide("reshard", tests=["test_a_layout_gives_the_weights_of_one_process"])
class TestAdafactor(OptimizerSuite):
    plugin = "adafactor"
    layouts = ("fsdp2tp2",)
    examples = {"beta1": [0.5]}
    beside = {"least_scale": {"optimizer.scale_parameter": True, "optimizer.least_scale": 10.0}}

    def reference(
        self, weight: Tensor, steps: list[DenseStep], parameter: Parameter, config: Adafactor.Config
    ) -> Tensor:
        """Of one matrix, vector or scalar, by the transformers library."""
        from transformers.optimization import Adafactor as Library

        held = torch.nn.Parameter(weight.clone())
        library = Library(
            [held],
            eps=(config.eps, config.least_scale),
            clip_threshold=config.clip,
            decay_rate=-config.decay_rate,
            beta1=config.beta1,
            scale_parameter=config.scale_parameter,
            relative_step=False,
            lr=1.0,
        )
        for gradient, lr, decay in steps:
            held.grad = gradient
            library.param_groups[0].update(lr=lr)
            before = held.detach().clone()
            library.step()
            with torch.no_grad():  # the library's own decay is scaled as the rate is
                held.sub_(lr * decay * before)
        return held.detach()


class TestScaled(TestAdafactor):
    settings = {"optimizer.scale_parameter": True, "optimizer.least_scale": 0.5, "optimizer.beta1": 0.9}
    settings |= {"optimizer.clip": 0.6, "optimizer.decay_rate": 0.5, "optimizer.eps": 1e-3}
    layouts = ()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")
class TestOnAGPU(TestAdafactor):
    settings = {"trainer.device": "cuda"}
    layouts = ()


def test_a_matrix_keeps_a_row_and_a_column_and_a_vector_its_own_shape() -> None:
    """Those of a fused weight are numbered; those of experts are stacked."""
    bench = dense.Bench(tiny_run({"optimizer.name": "adafactor"}), dense.make_pieces("cpu"))

    def shapes(name: str) -> dict[str, Any]:
        piece = next(piece for piece in bench.pieces if piece.name == name)
        return {
            n: one.shape if isinstance(one, ShapedState) else tuple(one.shape)
            for n, one in bench.optimizer.state(piece).items()
        }

    assert shapes("matrix") == {"step": (), "exp_avg_sq_row": (20,), "exp_avg_sq_col": (12,)}
    assert shapes("experts") == {"step": (), "exp_avg_sq_row": (3, 8), "exp_avg_sq_col": (3, 12)}
    assert shapes("vector") == {"step": (), "exp_avg_sq": (12,)}
    fused = {
        f"exp_avg_sq_{kind}.{n}": (rows if kind == "row" else 12,)
        for n, rows in enumerate((16, 8, 8))
        for kind in ("row", "col")
    }
    assert shapes("fused matrices") == {"step": (), **fused}
