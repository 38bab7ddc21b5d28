"""Weight gradients that are computed after the backward passes of a step, from operands that the passes hand out."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from layout_words import layouts
from tiny_models import DECODER, EXPERTS
from torch import Tensor

from mplug.gradients.sinks import GradientSink
from mplug_nn import MixtureOfExperts
from mplug_products.delayed import Taps, bits_of
from mplug_schedules.weight_gradients import Postponed, WeightGradients
from mplug_testing import run_workers
from mplug_testing.harness import in_fp64, tiny_run

Plant = Callable[..., None]
Settings = dict[str, Any]
SMALL: Settings = {"model.num_layers": 2, "trainer.micro_batch_size": 1}
SPARSE: Settings = {"model.name": "mixtral", "model.num_experts": 4, **SMALL}


def gradients(settings: Settings, postponed: bool) -> dict[str, Tensor]:
    """Be one rank: the gradient of every parameter after two micro batches, and the largest memory of operands."""
    warnings.simplefilter("ignore")  # torch's own, as it traces
    from mplug.training.assembly import build

    run = tiny_run(in_fp64(settings))
    run.step, parts = 1, build(run)
    model, stepper = parts.model, parts.stepper
    stepper.begin_step(1)  # type: ignore[attr-defined]
    later, left = WeightGradients(model), list[Postponed]()
    batches = list(parts.train_loader.take(run.config.trainer.global_batch_size))
    for number, batch in enumerate(batches):
        if number + 1 == len(batches):
            model.sinks.expect_last()
        entries = stepper.entries(batch, 1)  # type: ignore[attr-defined]
        if postponed:
            with later.postponing(entries) as one:
                loss, _ = model.loss(entries)
            left.append(one)
        else:
            loss, _ = model.loss(entries)
        loss.backward()
    if postponed:
        stale = [name for name, sink in model.sinks.items() if sink.stale]
        assert len(stale) == len(later.sites) > 8, stale
        assert not any(model.sinks[name].final for name in stale)
    for one in left:
        one.compute()
    assert all(sink.final for sink in model.sinks.values())
    model.sinks.finish()
    return {name: sink.buffer.clone() for name, sink in model.sinks.items()}


INDUCTOR: Settings = {"trainer.compile": "inductor"}
WIDE: list[Settings] = [
    {**SMALL, "kernels.linear": "product", "trainer.compile": "aot_eager"},
    *({**SPARSE, "trainer.compile": "never"}, {**SMALL, **INDUCTOR}, {**SPARSE, **INDUCTOR}),
    *({**SMALL, **INDUCTOR, "kernels.linear": kernel} for kernel in ("product", "delayed")),
    {**SMALL, **INDUCTOR, "memory.recompute.mode": "full"},
    {**SMALL, **INDUCTOR, "trainer.precision": "bf16"},
]


@pytest.mark.parametrize("settings", layouts([{**SMALL, "trainer.compile": "never"}], WIDE))
def test_postponed_gradients_are_bitwise_those_of_the_passes(plant: Plant, settings: Settings) -> None:
    if package := settings.get("kernels.linear"):
        plant(f"acme-{package}")
    now, later = (run_workers(1, gradients, settings, postponed)[0] for postponed in (False, True))
    assert now.keys() == later.keys()
    different = [name for name, gradient in now.items() if not torch.equal(gradient, later[name])]
    assert different == []
    assert all(bool(gradient.any()) for gradient in now.values())


ONE_PASS: dict[str, Settings] = {
    "modules that compute in another way, recomputed": {"adapters.lora.rank": 3, "memory.recompute.mode": "full"},
    "units whose wraps hand something to modules": {"adapters.lora.rank": 3, "adapters.lora.dropout": 0.2},
    "a product that a unit calls twice": {
        **DECODER,
        "model.name": "llama",
        "model.num_mtp_layers": 2,
        "model.qk_norm": False,
        "trainer.seq_length": 4,
    },
    "a product that multiplies part by part": EXPERTS,
}


def halves(*tokens: Tensor) -> tuple[tuple[Tensor, ...], ...]:
    """The content of `MixtureOfExperts.parts`: tokens in two parts."""
    return tuple(zip(*(one.tensor_split(2) for one in tokens), strict=True))


@pytest.mark.parametrize("case", ONE_PASS)
def test_a_postponed_pass_has_the_gradients_of_a_pass(case: str) -> None:
    """The pass without memory that finds the shapes of operands is the first pass of the model."""
    from mplug.training.assembly import build

    parts = build(tiny_run(in_fp64({**ONE_PASS[case], "model.num_layers": 1})))
    model, sinks, later = parts.model, parts.model.sinks, WeightGradients(parts.model)
    batch = next(iter(parts.train_loader.take(2)))
    entries = {**batch, "keys": torch.arange(2)}
    mixtures = [module for module in model.module.modules() if isinstance(module, MixtureOfExperts)]
    for mixture in mixtures:
        mixture.parts = halves

    def gradients(postponed: bool) -> dict[str, Tensor]:
        sinks.begin_step()
        sinks.expect_last()
        with later.postponing(entries) if postponed else nullcontext() as rest:
            loss, _ = model.loss(entries)
        with nullcontext() if rest is None else rest.backward():
            loss.backward()
        if rest is not None:
            assert sum("experts" in name and sink.stale for name, sink in sinks.items()) == 2 * len(mixtures)
            rest.compute()
        sinks.finish()
        return {name: sink.buffer.clone() for name, sink in sinks.items()}

    found, now = gradients(True), gradients(False)
    assert [name for name, gradient in now.items() if not torch.allclose(found[name], gradient, rtol=1e-12)] == []
    assert any(bool(gradient.any()) for gradient in now.values())


def test_a_gradient_is_not_final_before_its_postponed_contribution() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    sink, final = GradientSink("w", weight, torch.zeros(2)), list[str]()
    sink.listeners.append(lambda one: final.append(one.name))
    sink.begin_step()
    sink.expect_last()
    sink.postpone()
    (3 * weight).sum().backward()
    assert not sink.final
    with pytest.raises(RuntimeError, match="the gradient of 'w' is not complete: 1 contributions are missing"):
        sink.finish()
    sink.buffer.add_(1)
    sink.settle()
    assert final == ["w"]
    assert sink.buffer.tolist() == [4, 4]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.int64, torch.uint8, torch.bfloat16])
def test_operands_of_every_format_pass_a_tap_bit_by_bit(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 256, (3, 4 * dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    operand = bits.view(dtype)
    taps = Taps([operand], torch.device("cpu"))
    (tap,) = taps.later.taps
    assert taps.take() is None
    taps = Taps([operand], torch.device("cpu"))
    torch.autograd.backward(taps.later.taps, [bits_of(operand)])
    found = taps.take()
    assert found is not None
    assert tap.untyped_storage().nbytes() <= 8
    assert found[0].dtype == dtype
    assert torch.equal(found[0].view(torch.uint8), bits)


def test_an_operand_that_no_gradient_can_carry_is_refused() -> None:
    with pytest.raises(ValueError, match="the last dimension must be even"):
        bits_of(torch.zeros(2, 3, dtype=torch.float8_e4m3fn))
