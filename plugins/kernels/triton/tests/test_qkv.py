"""Queries, keys and values out of their packed projection: what is right in small, and that nothing is concatenated.

B batch, S sequence, H query heads, G KV heads, K head dim.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from mplug_triton.qkv import prepare_qkv
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from mplug_nn import Linear
from mplug_nn.attention import prepare_qk
from mplug_nn.attention import prepare_qkv as composition
from mplug_nn.packed_heads import passes_through

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
on_device = pytest.mark.usefixtures("kernels_run")
on_gpu = pytest.mark.gpu

# In small.

B, S, H, G, K = 2, 5, 4, 2, 16
PrepareQKV = Callable[..., tuple[Tensor, Tensor, Tensor]]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def prepared_by(prepare: PrepareQKV, heads: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    positions = torch.arange(S, device=DEVICE)[None]
    return prepare(heads, H, G, positions, *(weights or (None, None)), 1e-5, 1e4, prepare_qk)


def backward_of(prepare: PrepareQKV) -> Callable[[], object]:
    heads = drawn(B, S, H + 2 * G, K).requires_grad_()
    prepared = prepared_by(prepare, heads)
    upstream = [drawn(*x.shape, seed=1) for x in prepared]
    return lambda: torch.autograd.grad(prepared, heads, upstream)


@on_device
def test_one_operator_writes_the_packed_gradient_and_nothing_concatenates_or_pads(
    operators_of: Callable[[Callable[[], object]], list[str]],
) -> None:
    assert "aten.cat.default" in operators_of(backward_of(composition)), "there is something to save"
    assert operators_of(backward_of(prepare_qkv)) == ["mplug_triton.packed_gradient.default"]


@on_device
def test_values_are_a_view_of_the_packed_heads_and_queries_and_keys_are_contiguous() -> None:
    heads = drawn(B, S, H + 2 * G, K)
    q, k, v = prepared_by(prepare_qkv, heads)
    assert v.data_ptr() == heads[:, :, H + G :].data_ptr()
    assert torch.equal(v, heads[:, :, H + G :])
    assert q.is_contiguous()
    assert k.is_contiguous()


def test_with_neither_norm_nor_positions_it_splits() -> None:
    heads = drawn(B, S, H + 2 * G, K, device="cpu")
    parts = prepare_qkv(heads, H, G, torch.arange(S)[None], None, None, 1e-5, None, prepare_qk)
    assert [part.data_ptr() for part in parts] == [heads[:, :, n].data_ptr() for n in (0, H, H + G)]
    assert [part.shape[2] for part in parts] == [H, G, G]
    assert passes_through(prepare_qkv)


ARRANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "heads before positions": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "one number for all": lambda x: x.flatten()[0].expand_as(x),
    "rows that are not in one piece": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}


@on_device
@pytest.mark.parametrize("arranged", ARRANGED.values(), ids=ARRANGED)
def test_upstream_gradients_may_have_any_strides(arranged: Callable[[Tensor], Tensor]) -> None:
    weights = drawn(2, K, seed=3)

    def gradients(prepare: PrepareQKV) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (drawn(B, S, H + 2 * G, K), *weights)]
        prepared = prepared_by(prepare, *leaves)
        return torch.autograd.grad(prepared, leaves, [arranged(drawn(*x.shape, seed=5)) for x in prepared])

    for ours, expected in zip(gradients(prepare_qkv), gradients(composition), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@on_device
@pytest.mark.parametrize("needed", [("heads",), ("weights",)], ids=lambda needed: needed[0])
def test_what_needs_no_gradient_gets_none_and_the_rest_its_own(needed: tuple[str, ...]) -> None:
    def gradients(prepare: PrepareQKV) -> list[Tensor | None]:
        heads = drawn(B, S, H + 2 * G, K).requires_grad_("heads" in needed)
        weights = [x.clone().requires_grad_("weights" in needed) for x in drawn(2, K, seed=3)]
        q, *_ = prepared_by(prepare, heads, *weights)
        q.square().sum().backward()
        return [heads.grad, *(weight.grad for weight in weights)]

    for ours, expected in zip(gradients(prepare_qkv), gradients(composition), strict=True):
        assert (ours is None or not ours.any()) == (expected is None)
        if ours is not None and expected is not None:
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def backward_compiled_of(prepare: PrepareQKV, norm: bool) -> list[str]:
    """The operators of the backward graph that a compiler gets of a projection, prepared heads, causal attention."""
    names: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    project = Linear(24, (H + 2 * G) * K, bias=False).to(DEVICE)
    project.weight.data = drawn(*project.weight.shape, seed=9)

    def unit(x: Tensor, *weights: Tensor) -> Tensor:
        q, *others = prepared_by(prepare, project(x).unflatten(-1, (-1, K)), *weights)
        key, v = (one.repeat_interleave(H // G, dim=2) for one in others)
        return F.scaled_dot_product_attention(*(one.transpose(1, 2) for one in (q, key, v)), is_causal=True)

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=keep)
    run = torch.compile(unit, backend=backend, fullgraph=True)
    weights = [one.requires_grad_() for one in drawn(2, K, seed=3).unbind()] if norm else []
    run(drawn(B, S, 24).requires_grad_(), *weights).sum().backward()
    return names


@on_device
@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
@pytest.mark.parametrize("norm", [False, True], ids=["rope", "norm and rope"])
def test_a_compiled_backward_has_no_concatenation_either(norm: bool) -> None:
    assert "aten.cat.default" in backward_compiled_of(composition, norm), "there is something to save"
    names = backward_compiled_of(prepare_qkv, norm)
    assert not {"aten.cat.default", "aten.slice_scatter.default", "aten.constant_pad_nd.default"} & set(names)
    assert names.count("mplug_triton.packed_gradient.default") == 1


# At the size of a large model, on a GPU.

WIDE = {"batch": 4, "length": 4096, "heads": 16, "head_dim": 128}


def wide_inputs(groups: int, norm: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Packed heads in bf16 with the weights of QK-norm, if any; and upstream gradients of q, k, v."""
    b, s, h, k = WIDE.values()
    inputs = [drawn(b, s, h + 2 * groups, k, dtype=torch.bfloat16, device="cuda")]
    if norm:
        inputs += [1 + 0.2 * drawn(k, seed=seed, dtype=torch.bfloat16, device="cuda") for seed in (1, 2)]
    upstream = [
        drawn(b, s, n, k, seed=5 + i, dtype=torch.bfloat16, device="cuda") for i, n in enumerate((h, groups, groups))
    ]
    return inputs, upstream


def outcome(prepare: PrepareQKV, inputs: list[Tensor], upstream: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    groups, weights = upstream[1].shape[2], leaves[1:] or [None, None]
    positions = torch.arange(WIDE["length"], device="cuda")[None]
    prepared = prepare(leaves[0], WIDE["heads"], groups, positions, *weights, 1e-5, 1e4, prepare_qk)
    gradients = torch.autograd.grad(prepared, leaves, [g.to(dtype) for g in upstream])
    return [*(x.detach() for x in prepared), *gradients]


def compiled_by_inductor(function: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, backend="inductor", fullgraph=True, dynamic=False)


HOW: dict[str, Callable[[Any], Any]] = {"eager": lambda function: function, "inductor": compiled_by_inductor}


@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
class TestOnGPU:
    pytestmark = on_gpu

    @pytest.mark.parametrize("how", HOW.values(), ids=HOW)
    @pytest.mark.parametrize("norm", [False, True], ids=["rope", "norm and rope"])
    @pytest.mark.parametrize("groups", [16, 4])
    def test_it_is_closer_to_fp64_than_the_composition(
        self, groups: int, norm: bool, how: Callable[[Any], Any]
    ) -> None:
        inputs, upstream = wide_inputs(groups, norm)
        exact = outcome(composition, inputs, upstream, torch.float64)
        plain = outcome(composition, inputs, upstream, torch.bfloat16)
        ours = outcome(how(prepare_qkv), inputs, upstream, torch.bfloat16)
        names = ("q", "k", "v", "packed gradient", "gradient of q_weight", "gradient of k_weight")
        for name, x, usual, right in zip(names, ours, plain, exact, strict=False):
            assert x.dtype is torch.bfloat16
            error, allowed = ((found.double() - right).norm() / right.norm() for found in (x, usual))
            assert error <= max(float(allowed), 2**-9), (
                f"{name} is off by {error:.2e}, the composition by {allowed:.2e}"
            )
