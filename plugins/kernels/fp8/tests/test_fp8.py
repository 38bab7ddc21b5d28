"""The precision and its products: training near fp64 and under layouts, boundaries, and what they refuse."""

from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fp8_recipes import DELAYED, FUSED, NAMED, RECIPES
from mplug_fp8.products import Delayed, Rowwise, Tensorwise
from mplug_fp8.recipes import Options
from mplug_fp8.scaled import Products
from tiny_models import NARROW_MIXTRAL
from torch import Tensor

from mplug import Offer, Run
from mplug.config.sources import read_assignments
from mplug_nn import Boundary, Narrow, Operand
from mplug_saving.folder import newest
from mplug_testing import KernelSuite, PrecisionSuite, kernel_cases, run_workers, runs
from mplug_testing.harness import Trace, difference, tiny_config, train_ranks, train_steps

SEPARATE: dict[str, Any] = {"kernels.norm_product": None, "kernels.activation_product": None}
SAME, ROUNDED = 1e-5, 0.4
BANDS = {
    "dp2": SAME,
    "zero2": SAME,
    "zero2 parallel.zero.stage=2": SAME,
    "pp2": SAME,
    "tp2": ROUNDED,
    "tp2 parallel.tp.sequence_parallel=false": ROUNDED,
    "fsdp2": ROUNDED,
}
"""Maximum relative errors of gradients under a layout. dp, zero and pp quantise the numbers of one process, and sum
the same gradients. tp and fsdp round bf16 numbers or sums in another way, as they do in bf16 (errors of 0.02 to 0.04
here); where an fp8 number then rounds to the other side, it differs by 6%."""


@pytest.mark.wide("precision")
class TestDelayedProducts(KernelSuite):
    """Linear layers: torch's grouped product has no scales for experts but those of rows."""

    plugin = "fp8"
    settings: ClassVar = DELAYED
    dtypes = ("fp8",)
    error_factor = 64.0  # fp8 numbers have four bits of significand less than those of bf16

    @classmethod
    def naming(cls) -> dict[str, Any]:
        return {**super().naming(), "trainer.precision": "fp8"}

    @pytest.fixture(autouse=True)
    def without_sinks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A sink in fp32 has no rounding to compare with; test_quantisation.py checks it."""
        cases = [case for case in kernel_cases.cases() if "sink" not in case.name]
        monkeypatch.setattr(kernel_cases, "cases", lambda: cases)

    def _offered(self, dtype: str | None = None) -> tuple[Run, list[Offer]]:
        run, offers = super()._offered(dtype)
        return run, [offer for offer in offers if "Experts.product" not in offer.suppliers]


class TestTensorwiseProducts(TestDelayedProducts):
    settings: ClassVar = RECIPES["tensorwise"]


class TestRowwiseProducts(TestDelayedProducts):
    settings: ClassVar = RECIPES["rowwise"]

    def _offered(self, dtype: str | None = None) -> tuple[Run, list[Offer]]:
        return KernelSuite._offered(self, dtype)


@pytest.mark.wide("precision", tests=["test_a_layout_gives_the_run_of_one_process"])
class TestFused(PrecisionSuite):
    """Norms and activations together with the product after them, by delayed scaling."""

    plugin = "fp8"
    settings: ClassVar = {**NAMED, **FUSED}
    layouts = ("tp2",)
    tolerance = ROUNDED
    beside: ClassVar = {"scaling": {**SEPARATE, "precisions.fp8.when": "current"}, "when": SEPARATE}
    without_effect: ClassVar = {
        "history": "it counts steps, and the tiny run has two (tests/test_delayed_scaling.py looks at five)"
    }


@pytest.mark.wide("precision")
class TestDelayed(TestFused):
    checks_fields = False
    settings: ClassVar = {**NAMED, **DELAYED}


@pytest.mark.wide("precision")
class TestTensorwise(PrecisionSuite):
    plugin = "fp8"
    checks_fields = False
    settings: ClassVar = NAMED
    tolerance = ROUNDED


@pytest.mark.wide("precision")
class TestRowwise(TestTensorwise):
    settings: ClassVar = {**NAMED, **RECIPES["rowwise"]}


@pytest.mark.wide("precision")
class TestBlockwise(TestTensorwise):
    settings: ClassVar = {**NAMED, **RECIPES["blockwise"]}


@pytest.mark.wide("precision")
class TestExperts(TestTensorwise):
    settings: ClassVar = {
        **NAMED,
        **RECIPES["rowwise"],
        "kernels.experts": "fp8",
        **NARROW_MIXTRAL,
    }
    layouts = ("dp2", "ep2", "fsdp2")


RUN = {**NAMED, "trainer.precision": "fp8", "model.num_layers": 4}


@cache
def one_process(recipe: str) -> Trace:
    return train_steps({**RUN, **RECIPES[recipe]})


@pytest.mark.wide("precision")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", BANDS)
def test_a_layout_is_within_its_band_of_one_process(layout: str, recipe: str) -> None:
    word, *more = layout.split()
    settings = {".".join(key): setting.value for key, setting in read_assignments(more).items()}
    ranks = train_ranks(2, {**RUN, **RECIPES[recipe], "parallel.layout": word, **settings})
    alone = one_process(recipe)
    assert difference(ranks, alone, BANDS[layout]) == ""
    assert ranks[0].losses == pytest.approx(alone.losses, rel=5e-3)
    assert ranks[0].norms == pytest.approx(alone.norms, rel=2e-2)


@pytest.mark.wide("precision")
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_recomputed_blocks_give_the_same_bits_and_histories(recipe: str) -> None:
    again = train_steps({**RUN, **RECIPES[recipe], "memory.recompute.mode": "full"})
    assert difference([again], one_process(recipe), 0.0) == ""


def trained(settings: dict[str, Any], steps: int, directory: Path, resume_from: Path | None = None) -> list[float]:
    more = {"trainer.eval_every": 0, "checkpoint.asynchronous": False, "trainer.steps": steps}
    return runs.trained(tiny_config({**RUN, **DELAYED, **more, **settings}), directory, resume_from=resume_from).losses


@pytest.mark.wide("precision")
def test_histories_of_scales_resume_under_another_layout(tmp_path: Path) -> None:
    (whole,) = run_workers(1, trained, {}, 4, tmp_path / "whole")
    run_workers(2, trained, {"parallel.layout": "zero2"}, 2, tmp_path / "begun")
    begun = newest(tmp_path / "begun" / "checkpoints")
    for layout, band in (("pp2", SAME), ("tp2", 5e-3)):
        losses = run_workers(2, trained, {"parallel.layout": layout}, 4, tmp_path / layout, begun)[0]
        assert losses == pytest.approx(whole[2:], rel=band, abs=0), layout


# Boundaries: two ranks with the same data, so that a gather repeats its part.


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def delayed_buffers() -> dict[str, Tensor]:
    found = {name: torch.zeros(()) for name in ("input", "gradient")}
    return {**found, "input_scale": torch.full((1,), 16.0), "gradient_scale": torch.full((1,), 256.0)}


@pytest.mark.parametrize("kind", [Tensorwise, Delayed, Rowwise])
def test_tensorwise_products_gather_fp8_numbers_with_a_common_scale(kind: type[Products]) -> None:
    gathered: list[torch.dtype] = []
    asked: list[Tensor] = []

    def whole(part: Tensor) -> Tensor:
        gathered.append(part.dtype)
        return torch.cat([part, part], dim=-2)

    def largest(x: Tensor) -> Tensor:
        asked.append(x)
        return x * 4  # another rank has larger values

    boundary = Boundary(whole, lambda x: x[..., : x.shape[-2] // 2, :], largest)
    supplier, weight = kind(Options(power_of_two=True)), drawn(48, 32)
    x, grad_y = drawn(2, 5, 32, seed=1), drawn(2, 10, 48, seed=2)
    operand = Operand(weight, supplier.cast(weight, {}))
    results = []
    for before, part in ((boundary, x), (None, torch.cat([x, x], dim=-2))):
        narrow = Narrow(before=before)
        y, saved = supplier.forward(part, operand, narrow, delayed_buffers())
        grads: tuple[Any, Any] = supplier.backward(grad_y, operand, saved, None, narrow, delayed_buffers(), True)
        results.append((y, grads[0] if before else grads[0][..., :5, :], grads[1]))
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours, right, rtol=0.02, atol=0.02)  # powers of two: only small numbers differ
    assert set(gathered) == {torch.bfloat16 if kind is Rowwise else torch.float8_e4m3fn}
    assert len(asked) == (kind is Tensorwise)
    narrow, part = Narrow(after=boundary), grad_y[:, :5]
    gathered.clear()
    _, saved = supplier.forward(torch.cat([x, x], dim=-2), operand, narrow, delayed_buffers())
    grad_x, _ = supplier.backward(part, operand, saved, None, narrow, delayed_buffers(), True)
    assert grad_x is not None
    assert grad_x.shape == (2, 10, 32)
    assert set(gathered) == {torch.bfloat16 if kind is Rowwise else torch.float8_e5m2}


def test_a_common_scale_is_that_of_the_largest_rank() -> None:
    boundary = Boundary(lambda part: part, lambda x: x, lambda x: x * 4)
    supplier, x = Tensorwise(Options(power_of_two=True)), drawn(16, 32)
    alone, common = (
        supplier.quantised(x, supplier.measured(x, around), "input", {}).rows for around in (None, boundary)
    )
    assert float(common.inverse) == 4 * float(alone.inverse)
