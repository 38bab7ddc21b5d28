"""kernels/te and kernels/fp8 compute the same recipes: equal operands, and products that differ by their accumulation.

The plugins know nothing of each other. Both follow the recipe of the precision `fp8`.
"""

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from gpus import with_nccl
from mplug_nn import Inputs, Operand, Prologue
from mplug_nn.gemm import NOTHING
from mplug_nn.grouped import PLAIN_GROUPED, apply_grouped
from mplug_nn.product import WHOLE, apply_product
from mplug_nn.prologue import apply_fused
from mplug_testing import run_workers
from mplug_testing.fused import composed
from mplug_testing.grouped import of_weight
from mplug_testing.harness import tiny_run, train_steps
from mplug_testing.trials import initial
from torch import Tensor

from mplug.model.build import build_model
from mplug.tensors.sink import Weights

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


NORM_PRODUCT, ACTIVATION_PRODUCT, EXPERTS = "Linear.norm_product", "Linear.activation_product", "Experts.product"
KIND_OF = {NORM_PRODUCT: "norm_product", ACTIVATION_PRODUCT: "activation_product", EXPERTS: "experts"}
MIXTRAL = {"model.name": "mixtral", "model.num_experts": 4, "model.vocab_size": 256, "model.ffn_hidden_size": 256}


def settings(recipe: str, kernel: str, *slots: str) -> dict[str, Any]:
    """A run in which the kernel supplies the products of linear layers, and further slots."""
    own = {f"precisions.fp8.{name}": value for name, value in RECIPES[recipe].items()}
    model: dict[str, Any] = {"model.hidden_size": 128, "model.num_attention_heads": 2, "model.num_kv_heads": 1}
    run = {"trainer.device": "cuda", "trainer.precision": "fp8", "trainer.base_modules": ["head"]}
    named = {f"kernels.{kind}": kernel if slot in slots else None for slot, kind in KIND_OF.items()}
    if ACTIVATION_PRODUCT in slots:
        model["model.activation"] = "gelu_tanh"
    return {**run, **model, **(MIXTRAL if EXPERTS in slots else {}), **own, "kernels.linear": kernel, **named}


def supplied(recipe: str, kernel: str, slot: str = "Linear.product") -> tuple[Any, dict[str, Tensor]]:
    """The kernel's product for a layer that follows the recipe, and its buffers."""
    for filled in build_model(tiny_run(settings(recipe, kernel, slot))).slots:
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
    found, other = (train_steps(settings("delayed", kernel, NORM_PRODUCT)) for kernel in KERNELS)
    assert found.losses == pytest.approx(other.losses, rel=1e-2)
    assert found.norms == pytest.approx(other.norms, rel=0.05)


@pytest.mark.parametrize("recipe", RECIPES)
def test_runs_have_the_same_losses_within_their_rounding(recipe: str) -> None:
    found, other = (train_steps(settings(recipe, kernel)) for kernel in KERNELS)
    assert found.losses == pytest.approx(other.losses, rel=1e-2)
    assert found.norms == pytest.approx(other.norms, rel=0.05)


# Activations with the product of their result.


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("kind", ["gelu_tanh", "swiglu"])
def test_activations_with_their_products_differ_by_rounding_only(kind: str, has_bias: bool) -> None:
    """Transformer Engine adds the bias in bf16 before, so some fp8 numbers differ by a step."""
    found = [_activation_results(kernel, kind, has_bias) for kernel in KERNELS]
    for one, other in zip(*found, strict=True):
        assert error(one, other) < 2e-2
    inputs, weight = _activation_inputs(kind, has_bias)
    wide = Inputs(*(None if one is None else one.detach().double().requires_grad_() for one in inputs))  # type: ignore[arg-type]
    matrix = weight.detach().double().requires_grad_()
    y, _ = composed(Prologue(kind), wide, matrix)
    y.backward(drawn(2, 128, O_, seed=2).double())
    leaves = [one for one in (*wide, matrix) if one is not None]
    for one, right in zip(found[0], [y, *(leaf.grad for leaf in leaves)], strict=False):
        assert right is not None
        assert error(one, right) < 0.1


def _activation_inputs(kind: str, has_bias: bool) -> tuple[Inputs, Tensor]:
    width = I_ * (2 if kind == "swiglu" else 1)
    bias = drawn(width, seed=5, scale=0.1).requires_grad_() if has_bias else None
    return Inputs(drawn(2, 128, width).requires_grad_(), bias=bias), drawn(O_, I_, seed=1, scale=0.02).requires_grad_()


def _activation_results(kernel: str, kind: str, has_bias: bool) -> list[Tensor]:
    """The product, the gradients of x, of the bias and of the weight, and the buffers after the pass."""
    product, buffers = supplied("delayed", kernel, ACTIVATION_PRODUCT)
    inputs, matrix = _activation_inputs(kind, has_bias)
    sink, stale = torch.zeros((O_, I_), device="cuda"), torch.ones((), dtype=torch.bool)
    y = apply_fused(product, Prologue(kind), inputs, Weights(matrix, sink, stale), WHOLE, buffers)
    y.backward(drawn(2, 128, O_, seed=2))
    grads = [one.grad for one in inputs if one is not None and one.grad is not None]
    assert len(grads) == 1 + has_bias
    return [y.detach(), *grads, sink, buffers["input"], buffers["gradient"]]


# Experts.

LOADS = [(64, 64, 64, 64), (0, 200, 41, 15), (0, 0, 256, 0), (1, 0, 16, 128)]


def error(found: Tensor, right: Tensor) -> float:
    return float((found.detach().double() - right.double()).norm() / right.double().norm())


def grouped(
    product: Any,
    counts: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
    buffers: Mapping[str, Tensor] = NOTHING,
) -> list[Tensor]:
    """The output and both gradients of a grouped product; 8 rows with garbage follow those of the last group."""
    total = sum(counts)
    x, grad = drawn(total + 8, I_), drawn(total + 8, O_, seed=2, scale=1e-3)
    x[total:], grad[total:] = torch.nan, torch.nan
    x, weight = x.to(dtype).requires_grad_(), drawn(4, O_, I_, seed=1, scale=0.02).to(dtype).requires_grad_()
    sink, stale = torch.full((4, O_, I_), 9.0, device="cuda", dtype=torch.promote_types(dtype, torch.float32)), True
    weights = Weights(weight, sink, torch.tensor(stale))
    y = apply_grouped(product, x, torch.tensor(counts, device="cuda"), weights, buffers=buffers)
    y.backward(grad.to(dtype))
    assert x.grad is not None
    return [y.detach()[:total], x.grad[:total], sink]


def of_linear_layers(recipe: str, counts: tuple[int, ...]) -> list[Tensor]:
    """The same by the product of fp8 for a linear layer, for each group alone."""
    product, buffers = supplied(recipe, "fp8")
    x, grad = drawn(sum(counts) + 8, I_), drawn(sum(counts) + 8, O_, seed=2, scale=1e-3)
    weight, start = drawn(4, O_, I_, seed=1, scale=0.02), 0
    outputs, grads, sinks = [], [], torch.zeros((4, O_, I_), device="cuda")
    for number, count in enumerate(counts):
        if not count:
            continue
        part = slice(start, start + count)
        start += count
        leaf, matrix = x[part].clone().requires_grad_(), weight[number].clone().requires_grad_()
        weights = Weights(matrix, sinks[number], torch.ones((), dtype=torch.bool))
        y = apply_product(product, leaf, weights, WHOLE, buffers)
        y.backward(grad[part])
        assert leaf.grad is not None
        outputs.append(y.detach())
        grads.append(leaf.grad)
    return [torch.cat(outputs), torch.cat(grads), sinks]


@pytest.mark.parametrize("counts", LOADS, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_products_of_experts_are_those_of_fp8_for_each_group(
    recipe: str, counts: tuple[int, ...], record_property: Any
) -> None:
    """fp8 multiplies groups only rowwise, so its product of a linear layer is the reference for each group."""
    product, of_slot = supplied(recipe, "te", EXPERTS)
    buffers = of_weight(of_slot, "up")
    found, other = grouped(product, counts, buffers=buffers), of_linear_layers(recipe, counts)
    right, plain = grouped(PLAIN_GROUPED, counts, torch.float64), grouped(PLAIN_GROUPED, counts)
    for what, ours, theirs, usual, exact in zip(("y", "dx", "dw"), found, other, plain, right, strict=True):
        off, of_fp8, of_bf16 = (error(one, exact) for one in (ours, theirs, usual))
        record_property(what, f"{off:.2e}, fp8 {of_fp8:.2e}, torch in bf16 {of_bf16:.2e}")
        assert error(ours, theirs) < 2e-3, what
        assert of_bf16 < off < 0.08, what
    if buffers:
        assert float(buffers["input"]) == float(drawn(sum(counts) + 8, I_)[: sum(counts)].abs().max())


def test_a_run_with_te_in_all_slots_has_the_losses_of_bf16_within_the_rounding() -> None:
    for slots, recipe in (((NORM_PRODUCT, ACTIVATION_PRODUCT), "delayed"), ((EXPERTS,), "delayed")):
        run = {**settings(recipe, "te", *slots), "kernels.attention": "te", "kernels.norm": "te", "trainer.steps": 2}
        run |= {} if EXPERTS in slots else {"kernels.norm": None}
        plain = {
            key: value for key, value in run.items() if not key.startswith(("kernels", "precisions", "trainer.base"))
        }
        found, usual = train_steps(run), train_steps({**plain, "trainer.precision": "bf16"})
        assert found.losses == pytest.approx(usual.losses, rel=2e-2)
        assert found.norms == pytest.approx(usual.norms, rel=0.1)
        assert found.losses != usual.losses


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
