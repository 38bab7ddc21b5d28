"""AdamW over pieces, against the paper's algorithm in fp64."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from mplug_adamw import AdamW
from mplug_adamw.quantized import FIRST, SECOND, Code
from mplug_adamw.rounded import rounded
from tiny_runs import position_of
from torch import Tensor

from mplug import Parameter, UsageError
from mplug.model.build import build_model
from mplug.tensors.random import mix
from mplug_estimates import measure_bytes
from mplug_saving.folder import newest
from mplug_testing import DenseStep, OptimizerSuite, dense
from mplug_testing.harness import tiny_run
from mplug_testing.parity import require_parity


class TestAdamW(OptimizerSuite):
    plugin = "adamw"
    layouts = ("pp2", "fsdp2")

    def reference(self, weight: Tensor, steps: list[DenseStep], parameter: Parameter, config: AdamW.Config) -> Tensor:
        """Algorithm 2 of arXiv 1711.05101, with the decay that is decoupled multiplied by the learning rate."""
        first, second = torch.zeros_like(weight), torch.zeros_like(weight)
        for number, (gradient, lr, decay) in enumerate(steps, 1):
            first = config.beta1 * first + (1 - config.beta1) * gradient
            second = config.beta2 * second + (1 - config.beta2) * gradient**2
            unbiased = first / (1 - config.beta1**number), second / (1 - config.beta2**number)
            weight = weight * (1 - lr * decay) - lr * unbiased[0] / (unbiased[1].sqrt() + config.eps)
        return weight


class TestWithOtherMoments(TestAdamW):
    settings = {"optimizer.beta1": 0.5, "optimizer.beta2": 0.999, "optimizer.eps": 1e-3}
    layouts = ()
    checks_fields = False


class TestWithoutAFirstMoment(TestWithOtherMoments):
    settings = {"optimizer.beta1": 0.0, "optimizer.eps": 1e-6}


@pytest.mark.wide("reshard", tests=["test_a_layout_gives_the_weights_of_one_process"])
class TestWithMomentsInBF16(TestAdamW):
    """The reference has exact moments; a rounding is at most 2^-7 of a moment."""

    settings = {"optimizer.moments": "bf16", "optimizer.eps": 1e-3}
    layouts = ("fsdp2tp2",)
    tolerance = 0.03
    checks_fields = False


@pytest.mark.wide("layouts", tests=["test_a_layout_gives_the_weights_of_one_process"])
class TestWithMomentsOf8Bits(TestAdamW):
    """The reference has exact moments; a code is off by up to 1 of 127 roots. Weights of layouts are equal below."""

    settings = {"optimizer.moments": "8bit", "optimizer.eps": 1e-3}
    layouts = ("fsdp2tp2",)
    tolerance = 0.1
    checks_fields = False


@pytest.mark.parametrize("code", [FIRST, SECOND], ids=["signed", "unsigned"])
def test_a_code_is_a_neighbour_of_its_value_and_is_exact_on_average(code: Code) -> None:
    values = torch.linspace(0.02, 1.0, 61, dtype=torch.float64) ** (2**code.squarings)
    draws = ((torch.arange(1 << 12) + 0.5) / (1 << 12)).double()
    every = values[:, None].expand(-1, len(draws)).contiguous()
    scale = torch.full_like(every, 1.0)
    for sign in (1.0, -1.0) if code.signed else (1.0,):
        codes = code.encode(sign * every, scale, draws.expand_as(every))
        assert int((codes.max(1).values.int() - codes.min(1).values.int()).max()) == 1
        torch.testing.assert_close(code.decode(codes, scale).mean(1), sign * values, rtol=2e-3, atol=0)
    assert torch.equal(
        code.encode(torch.zeros(3), torch.tensor([0.0, 1.0, 2.0]), torch.zeros(3)).int(), torch.zeros(3).int()
    )


def test_a_code_of_a_code_is_that_code_and_a_small_second_moment_stays_above_zero() -> None:
    for code in (FIRST, SECOND):
        codes = torch.arange(-code.top if code.signed else 0, code.top + 1).to(code.dtype)
        scale = torch.full((len(codes),), 3.5, dtype=torch.float64)
        decoded = code.decode(codes, scale)
        off = (code.encode(decoded, scale, torch.full_like(scale, 0.5)).int() - codes.int()).abs()
        assert int(off.max()) == 0
    assert int(SECOND.encode(torch.tensor([1e-20]), torch.ones(1), torch.full((1,), 0.999))) == 1


EIGHT: dict[str, Any] = {"optimizer.moments": "8bit", "optimizer.eps": 1e-3}


@pytest.mark.wide("layouts", quick=["zero2"])
@pytest.mark.parametrize("layout", ["tp2", "zero2"])
def test_codes_of_8_bits_are_those_of_one_process(layout: str) -> None:
    require_parity(EIGHT, layout)


@pytest.mark.parametrize("layout", ["pp2", "fsdp2", "tp2zero2", "tp2pp2", "fsdp2tp2", "ep2", "etp2", "ep2zero2"])
@pytest.mark.wide("layouts")
def test_codes_of_8_bits_are_those_of_one_process_under_further_layouts(layout: str) -> None:
    require_parity({**(tiny_models.EXPERTS if "e" in layout.replace("zero", "") else {}), **EIGHT}, layout)


def test_moments_of_8_bits_cost_two_bytes_an_element_and_a_number_for_each_row_and_column() -> None:
    run = tiny_run({"optimizer.moments": "8bit"})
    model = build_model(run)
    expected = 0
    for placement in model.placements.values():
        shape = placement.shape
        if len(shape) == 1:
            expected += 4 + 8 * shape[0]
            continue
        segments = len(placement.dims[0])
        expected += 4 + 2 * placement.numel + 2 * 4 * (shape[0] + segments * shape[1])
    assert measure_bytes(run, model)["optimizer state"] == expected


@pytest.mark.parametrize("moments", ["masters", "bf16"])
def test_codes_of_8_bits_are_no_moments_of_another_format(moments: str, tmp_path: Path) -> None:
    """Also if the user allows the change: codes have the shape of moments."""
    saved = position_of(EIGHT, tmp_path)
    saved.run.step = 1
    saved.save()
    other = position_of({**EIGHT, "optimizer.moments": moments}, tmp_path)
    choice = other.choose(newest(saved.run.checkpoints))
    with pytest.raises(UsageError, match=r"has no optimizer state 'exp_avg' .*exp_avg_code"):
        other.load(choice, ("optimizer.moments",))


def test_stochastic_rounding_gives_a_neighbour_in_bf16_and_is_exact_on_average() -> None:
    """Of both signs and many sizes, and of what bf16 has, nothing changes."""
    values = dense.drawn((64,), "cpu", "x") * torch.logspace(-20, 20, 64)
    draws = torch.arange(1 << 14)
    found = rounded(values[:, None].expand(-1, len(draws)).contiguous(), mix(draws)).double()
    down = (values.view(torch.int32) & -(1 << 16)).view(torch.float32).double()[:, None]
    up = ((values.view(torch.int32) & -(1 << 16)) + (1 << 16)).view(torch.float32).double()[:, None]
    assert bool(((found == down) | (found == up)).all())
    share = (found.mean(dim=1) - down[:, 0]) / (up - down)[:, 0]
    expected = (values.double() - down[:, 0]) / (up - down)[:, 0]
    assert float((share - expected).abs().max()) < 0.02  # five standard errors of 16,384 draws
    exact = values.bfloat16().float()
    assert torch.equal(rounded(exact, mix(torch.arange(64))).float(), exact)


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
class TestOnAGPU(TestAdamW):
    settings = {"trainer.device": "cuda"}
    layouts = ()

    def test_it_says_one_pass(self) -> None:
        assert self._bench().optimizer.one_pass
