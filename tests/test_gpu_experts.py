"""What only a GPU can show of experts: torch's grouped products, that nothing waits for them, compiled units."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mplug import hookimpl
from mplug.run.prepare import prepare
from mplug.training.loop import train
from mplug_nn import Gating, MixtureOfExperts, Router, Weights, grouped_linear
from mplug_nn.grouped import _has_kernel
from mplug_steps.determinism import deterministic
from mplug_testing.harness import tiny_config
from mplug_testing.waiting import never_waiting

pytestmark = pytest.mark.gpu

D, F, E = 64, 96, 4
LOADS = [[5, 3, 7, 9], [0, 24, 0, 0], [1, 0, 0, 2], [0, 0, 0, 0], [3, 0, 21, 0]]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to("cuda", torch.bfloat16)


@pytest.mark.parametrize("counts", LOADS, ids=str)
def test_torchs_grouped_products_are_each_groups_own(counts: list[int]) -> None:
    rows, weight, grad = drawn(24, D).requires_grad_(), nn.Parameter(drawn(E, F, D, seed=1)), drawn(24, F, seed=2)
    assert _has_kernel(rows, weight.mT)
    main_grad, stale = torch.full((E, F, D), 7.0, device="cuda"), torch.ones((), dtype=torch.bool)
    for _ in range(2):
        y = grouped_linear(rows, torch.tensor(counts, device="cuda"), Weights(weight, main_grad, stale))
        y.backward(grad)
    assert rows.grad is not None
    start = 0
    for group, count in enumerate(counts):
        own = slice(start, start + count)
        wide, matrix = rows[own].detach().float(), weight[group].detach().float()
        torch.testing.assert_close(y[own].float(), wide @ matrix.T, rtol=1e-2, atol=1e-1)
        torch.testing.assert_close(rows.grad[own].float(), 2 * grad[own].float() @ matrix, rtol=2e-2, atol=2e-1)
        torch.testing.assert_close(main_grad[group], 2 * grad[own].float().T @ wide, rtol=1e-2, atol=1e-1)
        start += count


def mixture(**named: Any) -> MixtureOfExperts:
    router = Router(D, Gating(E, 2), balance="sequence", balance_coefficient=0.1, bias_rate=1e-3)
    moe = MixtureOfExperts(router, D, F, "swiglu", shared_ffn_dim=F, **named)
    for number, parameter in enumerate(moe.parameters()):
        nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))
    buffers = {name: buffer.clone() for name, buffer in moe.named_buffers()}
    moe = moe.to("cuda", torch.bfloat16)
    for name, buffer in buffers.items():  # which are of no precision
        module, _, attribute = name.rpartition(".")
        moe.get_submodule(module)._buffers[attribute] = buffer.cuda()
    for parameter in moe.parameters():
        sink: Any = parameter
        sink.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        sink.main_grad_stale = torch.ones((), dtype=torch.bool)
    return moe


def passes(moe: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = moe(x, torch.arange(x.shape[1], device="cuda")[None], torch.arange(len(x), device="cuda"), None)
    y.backward(torch.ones_like(y))
    return y


@pytest.mark.parametrize("named", [{}, {"capacity_factor": 1.0}], ids=["dropless", "capacity"])
def test_no_pass_through_experts_waits_for_the_device(named: dict[str, Any]) -> None:
    moe, x = mixture(**named), drawn(2, 32, D)
    passes(moe, x)  # what is found out once
    with never_waiting():
        passes(moe, x)
        moe.router.step_ended(torch.zeros((), device="cuda"))


def test_two_deterministic_passes_give_the_same_bits() -> None:
    with deterministic():
        found = []
        for _ in range(2):
            moe = mixture()
            y = passes(moe, drawn(4, 64, D))
            found.append((y, *(parameter.main_grad for parameter in moe.parameters())))  # type: ignore[attr-defined]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


class Losses:
    """The losses of a run, and the load of its first block."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.loads: list[list[float]] = []

    @hookimpl
    def step_finished(self, record: dict[str, Any]) -> None:
        self.losses.append(record["loss"])
        self.loads.append(record["statistics"]["blocks.0.moe.router.load"])


def trained(directory: Path, **changes: Any) -> Losses:
    model = {"model.name": "mixtral", "model.preset": "tiny", "model.num_experts": 8}
    batch = {"trainer.seq_length": 64, "trainer.micro_batch_size": 4, "trainer.global_batch_size": 8}
    steps = {"trainer.steps": 8, "trainer.eval_every": 0}
    settings = {**model, **batch, **steps, "trainer.device": "cuda", "trainer.precision": "bf16", **changes}
    watch = Losses()
    train(prepare(tiny_config(settings), {"host/watch": watch}, directory))
    return watch


@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
def test_compiled_experts_train_as_eager_ones_do(tmp_path: Path) -> None:
    eager = trained(tmp_path / "eager", **{"trainer.compile": "never"})
    compiled = trained(tmp_path / "compiled", **{"trainer.compile": "inductor"})
    assert compiled.losses == pytest.approx(eager.losses, rel=5e-3)
    assert [sum(load) for load in compiled.loads] == [8 * 64 * 2] * 8
