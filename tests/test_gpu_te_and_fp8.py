"""kernels/te and kernels/fp8 compute the same recipes: equal operands, and products that differ by their accumulation.

The plugins know nothing of each other. Both follow the recipe of the precision `fp8`.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from gpus import with_nccl
from torch import Tensor

from mplug.model.build import build_model
from mplug.nn import Inputs, Operand, Prologue
from mplug.nn.product import WHOLE, apply_product
from mplug.nn.prologue import apply_fused
from mplug.nn.sink import Weights
from mplug.testing import run_workers
from mplug.testing.harness import tiny_run, train_steps
from mplug.testing.trials import initial

NEEDED = ("transformer_engine", "mplug_te", "mplug_fp8")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here"),
    pytest.mark.skipif(any(find_spec(name) is None for name in NEEDED), reason=f"one of {NEEDED} is not installed"),
    pytest.mark.filterwarnings("ignore"),  # those of Transformer Engine and of torch's compiler
]
RECIPES = {
    "tensorwise": {"scaling": "tensorwise"},
    "tensorwise, powers of two": {"scaling": "tensorwise", "power_of_two": True},
    "delayed": {"scaling": "tensorwise", "when": "delayed", "history": 4},
    "blockwise": {"scaling": "blockwise"},
}
KERNELS = ("te", "fp8")
I_, O_ = 256, 384


NORM_PRODUCT = "Linear.norm_product"


def settings(recipe: str, kernel: str, norms: bool = False) -> dict[str, Any]:
    own = {f"precisions.fp8.{name}": value for name, value in RECIPES[recipe].items()}
    model = {"model.hidden_size": 128, "model.num_attention_heads": 2, "model.num_kv_heads": 1}
    run = {"trainer.device": "cuda", "trainer.precision": "fp8", "trainer.base_modules": ["head"]}
    return {**run, **model, **own, "kernels.linear": kernel, "kernels.norm_product": kernel if norms else None}


def supplied(recipe: str, kernel: str, slot: str = "Linear.product") -> tuple[Any, dict[str, Tensor]]:
    """The kernel's product for a layer that follows the recipe, and its buffers."""
    for filled in build_model(tiny_run(settings(recipe, kernel, slot == NORM_PRODUCT))).slots:
        if filled.site.slot == slot and filled.offer is not None and filled.site.needs:
            assert filled.supplier == f"kernels/{kernel}"
            declared = filled.offer.buffers(filled.site)
            return filled.offer.suppliers[slot], initial(declared, torch.bfloat16, "cuda")
    raise AssertionError(f"kernels/{kernel} fills no {slot} by its recipe")


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (scale * torch.randn(shape, device="cuda", generator=generator)).bfloat16()


def results(recipe: str, kernel: str) -> list[Tensor]:
    """The output, both gradients, and what the step collects."""
    product, buffers = supplied(recipe, kernel)
    x, weight = drawn(2, 128, I_).requires_grad_(), drawn(O_, I_, seed=1, scale=0.02).requires_grad_()
    sink, stale = torch.full((O_, I_), 3.0, device="cuda"), torch.ones((), dtype=torch.bool)
    y = apply_product(product, x, Weights(weight, sink, stale), WHOLE, buffers)
    y.backward(drawn(2, 128, O_, seed=2))
    assert x.grad is not None
    return [y.detach(), x.grad, sink, *(buffers[name] for name in sorted(buffers))]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_copies_of_a_weight_have_the_same_bits(recipe: str) -> None:
    weight = drawn(O_, I_, seed=1)
    copies = []
    for kernel in KERNELS:
        product, buffers = supplied(recipe, kernel)
        casts = product.cast(weight, buffers)
        if kernel == "fp8":  # keeps no copies, and casts in every pass
            operand = Operand(weight, casts)
            casts = (*product.weight_rows(operand), *product.weight_columns(operand))  # type: ignore[attr-defined]
        copies.append({tuple(one.shape): _used(one) for one in casts})
    assert copies[0].keys() == copies[1].keys()
    assert all(torch.equal(one, copies[1][shape]) for shape, one in copies[0].items())


def _used(copy: Tensor) -> Tensor:
    """fp8 numbers as bytes; inverses of blocks without the padding of their lines, which is never read."""
    if copy.dtype == torch.float32 and copy.dim() == 2:
        return copy[:, : (I_ + O_) // 128 - len(copy)]
    return copy.view(torch.uint8)


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_differ_by_their_accumulation_only(recipe: str) -> None:
    found, others = (results(recipe, kernel) for kernel in KERNELS)
    for one, other in zip(found[:3], others[:3], strict=True):
        assert float((one.double() - other.double()).norm() / other.double().norm()) < 2e-3
    assert all(map(torch.equal, found[3:], others[3:]))


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms_with_their_products_differ_by_rounding_only(kind: str, residual: bool) -> None:
    """Transformer Engine reduces the rows of a norm in another order; then some fp8 numbers differ by a step."""
    found = [_norm_results(kernel, kind, residual) for kernel in KERNELS]
    for one, other in zip(*found, strict=True):
        assert float((one.double() - other.double()).norm() / other.double().norm()) < 1e-2


def _norm_results(kernel: str, kind: str, residual: bool) -> list[Tensor]:
    """The product, the stream, the gradients of all inputs and of the weight, and the buffers after the pass."""
    product, buffers = supplied("delayed", kernel, NORM_PRODUCT)
    x, beside = drawn(2, 128, I_).requires_grad_(), drawn(2, 128, I_, seed=3).requires_grad_()
    norm_weight = (1 + drawn(I_, seed=4, scale=0.1)).requires_grad_()
    bias = drawn(I_, seed=5, scale=0.1).requires_grad_() if kind == "layernorm" else None
    sink, stale = torch.zeros((O_, I_), device="cuda"), torch.ones((), dtype=torch.bool)
    weight = Weights(drawn(O_, I_, seed=1, scale=0.02).requires_grad_(), sink, stale)
    inputs = Inputs(x, beside if residual else None, norm_weight, bias)
    y, summed = apply_fused(product, Prologue(kind, 1e-5), inputs, weight, WHOLE, buffers)
    torch.autograd.backward([y, summed], [drawn(2, 128, O_, seed=2), drawn(2, 128, I_, seed=6)])
    leaves = [one for one in inputs if one is not None]
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(grads) == len(leaves)
    return [y.detach(), summed.detach(), *grads, sink, buffers["input"], buffers["gradient"]]


def test_runs_with_norms_and_products_have_the_same_losses_within_their_rounding() -> None:
    found, other = (train_steps(settings("delayed", kernel, norms=True)) for kernel in KERNELS)
    assert found.losses == pytest.approx(other.losses, rel=1e-2)
    assert found.norms == pytest.approx(other.norms, rel=0.05)


@pytest.mark.parametrize("recipe", RECIPES)
def test_runs_have_the_same_losses_within_their_rounding(recipe: str) -> None:
    found, other = (train_steps(settings(recipe, kernel)) for kernel in KERNELS)
    assert found.losses == pytest.approx(other.losses, rel=1e-2)
    assert found.norms == pytest.approx(other.norms, rel=0.05)


def of_rank(changes: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Be one rank: the losses and gradient norms of its steps."""
    with_nccl()
    trace = train_steps(changes)
    return trace.losses, trace.norms


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {},
    "tp2, no sequence parallelism": {"parallel.tp.sequence_parallel": False},
    "zero2": {"trainer.micro_batch_size": 2},
    "fsdp2": {"trainer.micro_batch_size": 2},
    "pp2": {},
    "fsdp2, recomputed": {"memory.recompute.mode": "full"},
}


@cache
def alone(kernel: str) -> tuple[list[float], list[float]]:
    return run_workers(1, of_rank, settings("delayed", kernel))[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA GPUs here")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_gpus_train_as_one_within_the_rounding_of_fp8(name: str, kernel: str) -> None:
    changes = {**settings("delayed", kernel), **LAYOUTS[name], "parallel.layout": name.split(",")[0]}
    losses, norms = alone(kernel)
    for of_losses, of_norms in run_workers(2, of_rank, changes):
        assert of_losses == pytest.approx(losses, rel=1e-2)
        assert of_norms == pytest.approx(norms, rel=0.05)
