"""What flash-attn is called with, by a module in its place.

B batch, S sequence, H query heads, G KV heads, K head dim.
"""

import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any
from warnings import catch_warnings

import pytest
import torch
from mplug_flash.attention import core
from mplug_flash.fourth import backward, forward, packed_backward
from torch import Tensor

from mplug_nn import AttentionInputs, AttentionSpec, packed_heads_of
from mplug_nn.attention import scaled_dot_product
from mplug_nn.core import parts_of
from mplug_nn.parts import PLAIN_PARTS
from mplug_testing.capabilities import Setting, core_fault, parts_fault

SPEC = AttentionSpec(0.3, 8, 8)


class Fake(ModuleType):
    """flash-attn-4's two functions, of samples or of stretches of a long row of tokens.

    `calls` are their names with the arguments that are no tensors; `memory`, the storages that hold gradients.
    """

    def __init__(self) -> None:
        super().__init__("flash_attn.cute.interface")
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def _heard(self, name: str, named: dict[str, Any]) -> dict[str, Any]:
        self.calls.append((name, {key: value for key, value in named.items() if not isinstance(value, Tensor)}))
        return {"scale": named["softmax_scale"], "causal": named["causal"]}

    def _flash_attn_fwd(self, q: Tensor, k: Tensor, v: Tensor, **named: Any) -> tuple[Any, ...]:
        how = self._heard("forward", named)
        if OWN & named.keys():
            return *_weighted(q, k, v, named), None, None, None
        if "cu_seqlens_q" not in named:
            output, sums = PLAIN_PARTS.forward(q, k, v, **how)
            return output.contiguous(), sums.float(), None, None, None
        found = [PLAIN_PARTS.forward(q[i][None], *(x[j][None] for x in (k, v)), **how) for i, j in _stretches(named)]
        return torch.cat([output[0] for output, _ in found]), torch.cat([sums[0] for _, sums in found], 1), None

    def _flash_attn_bwd(self, q: Tensor, k: Tensor, v: Tensor, *others: Tensor, **named: Any) -> tuple[Tensor, ...]:
        output, gradient, sums = others
        into = [named[name] for name in ("dq", "dk", "dv")]
        self.memory = {place.untyped_storage().data_ptr() for place in into}
        how = self._heard("backward", named)
        if OWN & named.keys():
            found = _gradients(q, k, v, gradient, named)
            for place, one in zip(into, found, strict=False):
                place.copy_(one)
            return (*into, *found[3:])
        if "cu_seqlens_q" not in named:
            found = PLAIN_PARTS.backward(gradient, q, k, v, output, sums, **how)
        else:
            parts = [
                PLAIN_PARTS.backward(*(x[None] for x in (gradient[i], q[i], k[j], v[j], output[i], sums[:, i])), **how)
                for i, j in _stretches(named)
            ]
            found = tuple(torch.cat([one[0] for one in each]) for each in zip(*parts, strict=True))  # type: ignore[assignment]
        for place, gradients in zip(into, found, strict=True):
            place.copy_(gradients)
        return tuple(into)


OWN = {"window_size_left", "window_size_right", "softcap", "learnable_sink"}
"""Arguments that the parts of plain torch do not have."""


def _weighted(q: Tensor, k: Tensor, v: Tensor, named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) with the library's windows, soft cap and sinks."""
    if "cu_seqlens_q" in named:
        single = {name: x for name, x in named.items() if not name.startswith(("cu_", "max_"))}
        found = [_weighted(q[i][None], k[j][None], v[j][None], single) for i, j in _stretches(named)]
        return torch.cat([output[0] for output, _ in found]), torch.cat([sums[0] for _, sums in found], 1)
    sharers = q.shape[2] // k.shape[2]
    wide_k, wide_v = (x.repeat_interleave(sharers, dim=2) for x in (k, v))
    scores = torch.einsum("bshk,bthk->bhst", q, wide_k) * named["softmax_scale"]
    if cap := named.get("softcap"):
        scores = cap * (scores / cap).tanh()
    distances = torch.arange(k.shape[1]) - torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
    right = 0 if named["causal"] else named.get("window_size_right", k.shape[1])
    hidden = (distances > right) | (distances < -named.get("window_size_left", k.shape[1]))
    scores = scores.masked_fill(hidden, float("-inf"))
    if (sinks := named.get("learnable_sink")) is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], dim=3)
    weights = scores.softmax(dim=-1)[..., : k.shape[1]]
    return torch.einsum("bhst,bthk->bshk", weights, wide_v).contiguous(), scores.logsumexp(dim=-1).float()


def _gradients(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, named: dict[str, Any]) -> tuple[Tensor, ...]:
    sinks = named.get("learnable_sink")
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
        named = named if sinks is None else {**named, "learnable_sink": leaves[3]}
        return torch.autograd.grad(_weighted(*leaves[:3], named)[0], leaves, gradient)


def _stretches(named: dict[str, Any]) -> list[tuple[slice, slice]]:
    begins = [named[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k")]
    assert all(named[name].dtype == torch.int32 for name in ("cu_seqlens_q", "cu_seqlens_k"))
    return [(slice(a, b), slice(c, d)) for (a, b), (c, d) in zip(*(pairwise(x) for x in begins), strict=True)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    module = Fake()
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_fourth_version_is_called_with_a_causal_mask_and_no_window(
    fake: Fake, deterministic: bool, compiled: bool
) -> None:
    leaf, gradient = drawn(2, 9, 8, 8).requires_grad_(), drawn(2, 9, 4, 8)
    call = core(4, deterministic)
    if compiled:
        torch.compiler.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    with catch_warnings(action="ignore"):
        output = call(*leaf.split((4, 2, 2), dim=2), SPEC, AttentionInputs())
        (found,) = torch.autograd.grad(output, leaf, gradient)
    assert [name for name, _ in fake.calls] == ["forward", "backward"]
    assert fake.calls[0][1] == {"softmax_scale": 0.3, "causal": True, "return_lse": True}
    assert fake.calls[1][1] == {"softmax_scale": 0.3, "causal": True, "deterministic": deterministic}
    assert output.is_contiguous()
    exact = scaled_dot_product(*leaf.split((4, 2, 2), dim=2), SPEC)
    torch.testing.assert_close(output, exact)
    right = torch.autograd.grad(exact, leaf, gradient)[0]
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)  # the sums between them are fp32


@pytest.mark.usefixtures("fake")
def test_the_passes_of_the_fourth_version_are_operators_as_torch_wants_them() -> None:
    q, k, v, heads = drawn(2, 5, 4, 8), drawn(2, 5, 2, 8), drawn(2, 5, 2, 8) + 1, drawn(2, 5, 8, 8)
    with catch_warnings(action="ignore"):
        torch.library.opcheck(forward, (q, k, v, 0.3, False))
        torch.library.opcheck(backward, (drawn(2, 5, 4, 8), q, k, v, *forward(q, k, v, 0.3, False), 0.3, True))
        torch.library.opcheck(forward, (q, k, v, 0.3, False, True, None, drawn(4), 3, 2.0))
        saved = forward(*heads.split((4, 2, 2), dim=2), 0.3, False)
        torch.library.opcheck(packed_backward, (drawn(2, 5, 4, 8), heads, *saved, 4, 0.3, True))


EVERYTHING: dict[str, Any] = {"window": 3, "soft_cap": 2.0, "sinks": True}


@pytest.mark.parametrize(
    ("asked", "compiled"),
    [
        ({"window": 3}, False),
        ({"window": 3, "causal": False}, False),
        ({"window": 1}, False),
        ({"soft_cap": 2.0}, False),
        ({"sinks": True}, False),
        (EVERYTHING, True),
        ({**EVERYTHING, "documents": True}, True),
        ({**EVERYTHING, "documents": True, "causal": False}, False),
    ],
    ids=str,
)
def test_the_fourth_version_is_given_windows_soft_caps_and_sinks_as_the_specification_means_them(
    fake: Fake, asked: dict[str, Any], compiled: bool
) -> None:
    spec, call = replace(SPEC, **asked), core(4, False)
    if compiled:
        torch.compiler.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    lengths = torch.tensor([[2, 7, 0], [1, 5, 3]]) if spec.documents else None
    leaf, sinks, gradient = drawn(2, 9, 8, 8).requires_grad_(), drawn(4).requires_grad_(), drawn(2, 9, 4, 8)
    leaves = [leaf, *([sinks] if spec.sinks else [])]
    inputs = AttentionInputs(None, lengths, sinks if spec.sinks else None)
    both = []
    for one in (call, scaled_dot_product):
        with catch_warnings(action="ignore"):
            output = one(*leaf.split((4, 2, 2), dim=2), spec, inputs)
            both.append((output.detach(), *torch.autograd.grad(output, leaves, gradient)))
    assert [name for name, _ in fake.calls] == ["forward", "backward"]
    for found, exact in zip(*both, strict=True):
        torch.testing.assert_close(found, exact)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("heads", [(4, 4, 8), (4, 1, 8)])
def test_the_fourth_version_keeps_to_documents_and_computes_parts(heads: tuple[int, int, int]) -> None:
    setting, call = Setting(*heads, torch.float32, "cpu"), core(4, False)
    with catch_warnings(action="ignore"):
        assert core_fault(call, setting, causal=False) == ""
        assert core_fault(call, setting, documents=True) == ""
    assert parts_fault(parts_of(call), setting, packed=True) == ""


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("asked", [{}, {"causal": False}, {"documents": True}], ids=["causal", "full", "documents"])
def test_the_fourth_version_writes_the_gradient_of_packed_heads_into_one_tensor(
    fake: Fake, asked: dict[str, bool], compiled: bool
) -> None:
    call, packed = core(4, False), packed_heads_of(core(4, False, packed_heads=True))
    assert packed is not None
    spec, lengths = replace(SPEC, **asked), torch.tensor([[2, 7, 0], [1, 5, 3]]) if asked.get("documents") else None
    assert packed.serves(spec)
    inputs, leaf, gradient = AttentionInputs(None, lengths), drawn(2, 9, 8, 8).requires_grad_(), drawn(2, 9, 4, 8)
    attend = packed.attend
    if compiled:
        torch.compiler.reset()
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with catch_warnings(action="ignore"):
        output = attend(leaf, 4, 2, spec, inputs)
        (found,) = torch.autograd.grad(output, leaf, gradient)
    assert fake.memory == {found.untyped_storage().data_ptr()}
    plain = call(*leaf.split((4, 2, 2), dim=2), spec, inputs)
    assert torch.equal(output, plain)
    assert torch.equal(found, torch.autograd.grad(plain, leaf, gradient)[0])
    assert len(fake.memory) == 3


def test_packed_heads_are_for_the_fourth_version_and_for_rows_whose_beginnings_are_aligned() -> None:
    assert packed_heads_of(core(3, False)) is packed_heads_of(core(2, True)) is packed_heads_of(core(4, True)) is None
    packed = packed_heads_of(core(4, True, packed_heads=True))
    assert packed is not None
    for asked in ({"window": 4}, {"dropout": 0.1}, {"sinks": True}, {"own_key_length": True}, {"bias": "alibi"}):
        named: dict[str, Any] = dict(asked)
        assert not packed.serves(replace(SPEC, **named))
    assert not packed.serves(AttentionSpec(0.3, 12, 12))


@pytest.mark.parametrize("gives_sums", [False, True])
@pytest.mark.parametrize(("version", "module"), [(3, "flash_attn_interface"), (2, "flash_attn")])
def test_older_versions_are_called_with_a_causal_mask_no_window_and_where_documents_begin(
    monkeypatch: pytest.MonkeyPatch, version: int, module: str, gives_sums: bool
) -> None:
    heard: list[tuple[Any, ...]] = []

    def called(q: Tensor, k: Tensor, v: Tensor, *where: Any, **named: Any) -> Any:
        heard.append((q.shape, k.shape, where, named))
        return (q, q) if gives_sums else q

    functions = SimpleNamespace(flash_attn_func=called, flash_attn_varlen_func=called)
    monkeypatch.setitem(sys.modules, module, functions)
    q, k, v = drawn(2, 5, 8, 8).split((4, 2, 2), dim=2)
    assert torch.equal(core(version, True)(q, k, v, replace(SPEC, dropout=0.25), AttentionInputs()), q)
    inputs = AttentionInputs(None, torch.tensor([[2, 3, 0], [1, 1, 3]]))
    assert torch.equal(core(version, False)(q, k, v, replace(SPEC, documents=True), inputs), q)
    dropout = {"dropout_p": 0.25} if version == 2 else {}
    assert heard[0][2:] == ((), {"softmax_scale": 0.3, "causal": True, "deterministic": True, **dropout})
    of_q, of_k, (begins, same, *longest), named = heard[1]
    assert (of_q, of_k, longest, named["causal"]) == ((10, 4, 8), (10, 2, 8), [5, 5], True)
    assert begins is same
    assert begins.tolist() == [0, 2, 5, 5, 6, 7, 10]
