"""The cases of every slot have teeth: plain torch passes them, and they catch what is wrong with a supplier.

`test_suites.py` has the suite of a package.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mplug_nn import SLOTS as ALL_SLOTS
from mplug_nn import AttentionInputs, AttentionSpec, Gemm, MixerInputs, chunked_scan, short_convolution
from mplug_nn.attention import prepare_qk, prepare_qkv, scaled_dot_product
from mplug_nn.experts import combine, compute, dispatch
from mplug_nn.loss import cross_entropy
from mplug_nn.mlp import activation
from mplug_nn.norm import norm_residual
from mplug_testing.kernel_cases import cases
from mplug_testing.kernel_checks import Trial, own_dropout_fault


def first_fault(slot: str, supplier: Any, dtype: torch.dtype, check: Callable[[Trial], str]) -> str:
    """What a check finds wrong with a supplier, in the first case in which it finds anything."""
    for case in cases():
        if slot in case.slots:
            found = check(Trial(case, {**case.plain, slot: supplier}, dtype, "cpu", f"{slot} with {case.name}"))
            if found:
                return found
    return ""


def plain_of(slot: str) -> Any:
    return next(case.plain[slot] for case in cases() if slot in case.slots)


CHECKS: dict[str, Callable[[Trial], str]] = {
    "values": lambda trial: trial.values_fault(1.0),
    "strides": lambda trial: trial.strided_fault(2.0),
    "in place": Trial.in_place_fault,
    "repeated": Trial.repeated_fault,
}


BF16 = {"Attention.core", "Linear.gemm", "Loss.cross_entropy"}
"""The slots that the quick tests check in bf16 as well: attention, a sink of gradients, and a sum."""
SLOTS = [(slot, torch.float32) for slot in ALL_SLOTS] + [
    pytest.param(slot, torch.bfloat16, marks=[] if slot in BF16 else pytest.mark.wide("suites")) for slot in ALL_SLOTS
]


@pytest.mark.parametrize(("slot", "dtype"), SLOTS)
def test_plain_torch_passes_every_check_of_every_slot(slot: str, dtype: torch.dtype) -> None:
    assert {name: first_fault(slot, plain_of(slot), dtype, check) for name, check in CHECKS.items()} == dict.fromkeys(
        CHECKS, ""
    )


@pytest.mark.parametrize("slot", ["Linear.gemm", "Embedding.lookup", "Dropout.rows"])
@pytest.mark.wide("compile", quick=["Embedding.lookup"])
def test_plain_torch_traces_into_one_graph(slot: str) -> None:
    assert first_fault(slot, plain_of(slot), torch.float32, lambda trial: trial.compiled_fault(1.0)) == ""


def overwriting(grad_y: Tensor, x: Tensor, main_grad: Tensor | None) -> Tensor | None:
    grad_weight = grad_y.flatten(0, -2).T @ x.flatten(0, -2)
    if main_grad is None:
        return grad_weight
    main_grad.copy_(grad_weight)
    return None


def returning_too(grad_y: Tensor, x: Tensor, main_grad: Tensor | None) -> Tensor | None:
    grad_weight = grad_y.flatten(0, -2).T @ x.flatten(0, -2)
    if main_grad is not None:
        main_grad.add_(grad_weight)
    return grad_weight


FAULTS: dict[str, tuple[str, Any, str]] = {
    "a rank counts itself twice": ("Router.summed", lambda values, _: 2 * values, "the only rank's sum is wrong"),
    "weight gradients overwrite the sink": (
        "Linear.gemm",
        Gemm(wgrad=overwriting),
        "the gradient sink has an error of",
    ),
    "weight gradients come back too": ("Linear.gemm", Gemm(wgrad=returning_too), "would count twice"),
    "input gradients of odd widths are left out": (
        "Linear.gemm",
        Gemm(dgrad=lambda grad_y, weight: grad_y @ weight * (weight.shape[1] % 2 == 0)),
        "odd widths: the gradient of x has an error of",
    ),
    "a collective without a group is no identity": ("Linear.gather", lambda x: x * 1.01, "the output has an error of"),
    "a scatter cuts the gradient off": ("Linear.scatter", lambda y: y.detach(), "the gradient of x is missing"),
    "a table has no gradient": (
        "Embedding.lookup",
        lambda indices, weight: weight.detach()[indices],
        "the gradient of weight is missing",
    ),
    "rows begin at one": ("Dropout.rows", lambda positions: positions + 1, "the numbering of rows is wrong"),
    "the rows of a stream are scaled": ("Join.gather", lambda rows: rows * 1.01, "the output has an error of"),
    "the places of rows are moved": ("Join.positions", lambda places: places.roll(1, 1), "the output is wrong"),
}
"""Slots, wrong suppliers of them, and words of the fault that their cases find."""


def wrong(slot: str, words: str) -> Callable[[Any], Any]:
    """A function that is a wrong supplier; its name says why."""

    def add(supplier: Any) -> Any:
        FAULTS[supplier.__name__.replace("_", " ")] = (slot, supplier, words)
        return supplier

    return add


@wrong("Attention.core", "with ALiBi: the output has an error of")
def slopes_of_local_heads(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    local = inputs._replace(first_head=0, num_heads=q.shape[2])
    return scaled_dot_product(q, k, v, spec, local if spec.bias else inputs)


@wrong("Attention.core", "with attention sinks: the gradient of sinks is missing")
def sinks_without_gradient(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    sinks = None if inputs.sinks is None else inputs.sinks.detach()
    return scaled_dot_product(q, k, v, spec, inputs._replace(sinks=sinks))


@wrong("Attention.core", "with a window: the output has an error of")
def window_of_one_more(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    wider = None if spec.window is None else spec.window + 1
    return scaled_dot_product(q, k, v, replace(spec, window=wider), inputs)


@wrong("Attention.core", "with a soft cap: the output has an error of")
def without_a_cap(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    return scaled_dot_product(q, k, v, replace(spec, soft_cap=None), inputs)


@wrong("Experts.dispatch", "choices that were dropped: the counts is wrong")
def counting_dropped_choices(
    x: Tensor, chosen: Tensor, gates: Tensor, num_experts: int, num_rows: int | None = None
) -> tuple[Tensor, Tensor, Any]:
    rows, counts, route = dispatch(x, chosen, gates, num_experts, num_rows)
    return rows, counts + torch.tensor([*[0] * (num_experts - 1), int((chosen == num_experts).sum())]), route


@wrong("Experts.combine", "each expert chosen: the tokens put together has an error of")
def unweighted(rows: Tensor, gates: Tensor, route: Any) -> Tensor:
    return combine(rows, (gates != 0).to(gates.dtype), route)


@wrong("Experts.compute", "gelu: the rows has an error of")
def first_expert_for_all(rows: Tensor, counts: Tensor, *rest: Any) -> Tensor:
    return compute(rows, torch.zeros_like(counts).index_fill(0, torch.tensor([0]), int(counts.sum())), *rest)


@wrong("Norm.norm_residual", "with a residual and a bias: the normed sum has an error of")
def norm_of_x_alone(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    return norm_residual(x, None, *rest)[0], x if residual is None else x + residual


@wrong("MLP.activation", "swiglu: the output has an error of")
def swapped_swiglu(x: Tensor, bias: Tensor | None, kind: Any) -> Tensor:
    return activation(x.roll(x.shape[-1] // 2, -1) if kind == "swiglu" else x, bias, kind)


@wrong("Loss.cross_entropy", "the loss has an error of")
def mean_loss(hidden: Tensor, project: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss, count = cross_entropy(hidden, project, labels)
    return loss / count.clamp(min=1), count


@wrong("Loss.cross_entropy", "ignored labels: the number of targets is wrong")
def counting_everything(hidden: Tensor, project: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    return cross_entropy(hidden, project, labels)[0], torch.tensor(labels.numel())


@wrong("Attention.prepare_qk", "with QK-norm: the prepared q has an error of")
def without_norm(q: Tensor, k: Tensor, positions: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return prepare_qk(q, k, positions, None, None, *rest[2:])


@wrong("Attention.prepare_qk", "with positions of each sample: the prepared q has an error of")
def positions_from_zero(q: Tensor, k: Tensor, positions: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return prepare_qk(q, k, positions - positions[:, :1], *rest)


@wrong("Attention.prepare_qkv", "with rotary positions: the gradient of packed heads has an error of")
def values_without_gradient(*packed: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = prepare_qkv(*packed)
    return q, k, v.detach()


@wrong("Attention.prepare_qkv", "with grouped KV heads: the prepared k has shape (2, 6, 4, 8) instead of (2, 6, 2, 8)")
def as_many_keys_as_queries(heads: Tensor, h: int, g: int, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k = rest[-1](heads[:, :, :h], heads[:, :, h : 2 * h], *rest[:-1])
    return q, k, heads[:, :, -g:]


@wrong("Attention.prepare_qkv", "with QK-norm: the prepared k has an error of")
def keys_normed_as_queries(
    heads: Tensor, h: int, g: int, positions: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return prepare_qkv(heads, h, g, positions, q_weight, q_weight, *rest)


@wrong("Attention.prepare_qkv", "with rotary positions: the gradient of packed heads has an error of")
def gradients_not_turned_back(heads: Tensor, h: int, g: int, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = prepare_qkv(heads.detach(), h, g, *rest)
    straight = heads - heads.detach()  # 0, with a gradient of 1
    return q + straight[:, :, :h], k + straight[:, :, h : h + g], v + straight[:, :, h + g :]


@wrong("Attention.prepare_qkv", "with positions of each sample: the prepared q has an error of")
def positions_of_the_first_sample(heads: Tensor, h: int, g: int, positions: Tensor, *rest: Any) -> Any:
    return prepare_qkv(heads, h, g, positions[:1], *rest)


@wrong("Scan.core", "kind 'decay', documents: the output has an error of")
def leaking_scan(*arguments: Any) -> tuple[Tensor, Tensor]:
    *given, spec, inputs = arguments
    return chunked_scan(*given, spec, MixerInputs(None, inputs.state))


@wrong("Scan.core", "kind 'delta': the output has an error of")
def decay_after_the_read(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, write: Any, *rest: Any) -> Any:
    if write is not None and rest[0].kind == "delta":
        decay = torch.cat((torch.zeros_like(decay[:, :1]), decay[:, :-1]), dim=1)
    return chunked_scan(q, k, v, decay, write, *rest)


@wrong("Scan.core", "states and a length of several chunks: the end state has an error of")
def state_before_the_last_position(*arguments: Any) -> tuple[Tensor, Tensor]:
    *given, spec, inputs = arguments
    y, end = chunked_scan(*given, spec, inputs)
    if spec.states and y.shape[1] > 1 and inputs.document_lengths is None:
        _, end = chunked_scan(*(None if x is None else x[:, :-1] for x in given), spec, inputs)
    return y, end


@wrong("Scan.core", "states and a length of several chunks: the gradient of state has an error of")
def no_gradient_for_the_start_state(*arguments: Any) -> tuple[Tensor, Tensor]:
    *given, spec, inputs = arguments
    start = None if inputs.state is None else inputs.state.detach() + 0 * inputs.state
    return chunked_scan(*given, spec, inputs._replace(state=start))


@wrong("Convolution.core", "with documents: the output has an error of")
def leaking_convolution(*arguments: Any) -> tuple[Tensor, Tensor]:
    *given, spec, inputs = arguments
    return short_convolution(*given, spec, MixerInputs(None, inputs.state))


@wrong("Convolution.core", "with width 4 and SiLU: the output has an error of")
def mirrored_convolution(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return short_convolution(x, weight.flip(1), *rest)


@pytest.mark.parametrize(("slot", "supplier", "words"), FAULTS.values(), ids=FAULTS)
def test_the_cases_of_a_slot_catch(slot: str, supplier: Any, words: str) -> None:
    assert words in first_fault(slot, supplier, torch.float32, lambda trial: trial.values_fault(4.0))


def dropping(drawn: Callable[[torch.Size], Tensor], scaled_by: float, again: bool = False) -> Callable[..., Tensor]:
    """Attention that drops by a mask of its own; with `again`, backward draws another."""

    class Mix(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weights: Tensor, v: Tensor) -> Tensor:
            ctx.save_for_backward(weights, v)
            return mixed(weights * drawn(weights.shape) * scaled_by, v)

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> Any:
            weights, v = ctx.saved_tensors
            with torch.enable_grad():
                leaf = v.detach().requires_grad_()
                mixed(weights * drawn(weights.shape) * scaled_by, leaf).backward(upstream)
            return None, leaf.grad

    def core(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        ones = torch.eye(k.shape[1])[None, :, None].expand(*k.shape[:3], -1)
        weights = scaled_dot_product(q, k, ones, replace(spec, dropout=0.0), inputs)
        if not spec.dropout:
            return mixed(weights, v)
        if again:
            return Mix.apply(weights, v)  # type: ignore[no-any-return]
        return mixed(weights * drawn(weights.shape) * scaled_by, v)

    return core


def mixed(weights: Tensor, v: Tensor) -> Tensor:
    """Weights [B, S, H, T], values [B, T, H, K] -> [B, S, H, K]."""
    return torch.einsum("bsht,bthk->bshk", weights, v)


OWN = torch.Generator().manual_seed(0)
KEPT = 1 / 0.75
"""The factor of the weights that dropout keeps."""


@pytest.mark.parametrize(
    ("drawn", "scaled_by", "again", "words"),
    [
        (lambda shape: torch.rand(shape) < 0.75, KEPT, False, ""),
        (lambda shape: torch.rand(shape) < 0.75, 1.0, False, "not scaled by"),
        (lambda shape: torch.rand(shape) < 0.6, KEPT, False, "it keeps 59"),
        (lambda shape: torch.rand(shape) < 1.0, KEPT, False, "it keeps 100"),
        (lambda shape: torch.rand(shape, generator=OWN) < 0.75, KEPT, False, "from torch's default generators"),
        (lambda shape: torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.75, KEPT, False, "same mask"),
        (lambda shape: torch.rand(shape) < 0.75, KEPT, True, "backward drops other weights than forward"),
    ],
)
def test_a_dropout_of_its_own_is_judged(drawn: Any, scaled_by: float, again: bool, words: str) -> None:
    """By how often it drops, and by where it comes from: the host seeds torch's generators before every unit."""
    torch.manual_seed(0)
    found = own_dropout_fault(dropping(drawn, scaled_by, again), 0.25, "cpu")
    assert words in found
    assert bool(words) == bool(found)
