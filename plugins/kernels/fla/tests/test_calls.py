"""What flash-linear-attention is called with, by modules in its place that compute the same in plain torch.

B batch, S positions, G key heads, H value heads, K key width, V value width, N samples or documents.
"""

import contextlib
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any
from warnings import catch_warnings

import pytest
import torch
from mplug_fla.convolution import convolution
from mplug_fla.scans import backward_pass, forward_pass, scan, scan_by_channel
from mplug_fla.sequences import sequences
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mplug_nn import ConvolutionSpec, MixerInputs, ScanSpec, recurrent_scan, short_convolution

B, S, G, H, K, V, C, W = 2, 9, 2, 4, 6, 5, 7, 4
LENGTHS = torch.tensor([[2, 6, 1, 0], [9, 0, 0, 0]])
KINDS = ("decay", "channel decay", "delta", "channel delta")
NAMES = {"delta": "gated_delta_rule", "channel delta": "kda", "decay": "simple_gla", "channel decay": "gla"}


class Library:
    """The functions that the plugin calls, with the arguments and results of release 0.6. `calls` are its scans."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, bool]] = []

    def modules(self) -> dict[str, ModuleType]:
        found: dict[str, dict[str, Any]] = {
            f"fla.ops.{name}.chunk": {
                f"chunk_{name}_fwd": self.forward(kind),
                f"chunk_{name}_bwd": self.backward(kind),
            }
            for kind, name in NAMES.items()
        }
        found["fla.ops.utils"] = {"chunk_local_cumsum": summed}
        found["fla.ops.utils.constant"] = {"RCP_LN2": 1.4427}
        found["fla.ops.utils.index"] = {"prepare_chunk_indices": lambda _, size: torch.tensor([size])}
        found["fla.modules.causal_conv1d"] = {"causal_conv1d_fwd": convolved, "causal_conv1d_bwd": convolved_backward}
        made = {}
        for name, functions in found.items():
            made[name] = ModuleType(name)
            vars(made[name]).update(functions)
        return made

    def forward(self, kind: str) -> Any:
        def called(*, g: Tensor, beta: Tensor | None = None, output_final_state: bool, **named: Any) -> Any:
            named.pop("g_cumsum", None)
            chunk = named["chunk_size"]
            self.calls.append((kind, chunk, named["cu_seqlens"] is not None))
            y, end = scanned(kind, named, g, beta)
            ends = end if output_final_state else None
            products = named["v"].new_zeros(*named["v"].shape[:3], chunk)
            if kind == "delta":
                return g.clone(), y, products, ends, named["initial_state"], None
            if kind == "channel delta":
                return y, ends, g.clone(), products, products.clone(), None, None, None, None, None, None, None
            return (y, ends) if kind == "decay" else (g.clone(), products.float(), None, ends, y)

        return called

    def backward(self, kind: str) -> Any:
        def called(
            *, g: Tensor | None, do: Tensor, dht: Tensor | None, beta: Tensor | None = None, **named: Any
        ) -> Any:
            decay = named.pop("g_cumsum", None) if g is None else g
            for saved in ("A", "Aqk", "Akk"):
                assert saved not in named or named.pop(saved).shape[-1] == named["chunk_size"]
            assert named.pop("h", None) is named.pop("g_gamma", None) is None
            names = [one for one in ("q", "k", "v", "initial_state") if named[one] is not None]
            leaves = {one: named[one].detach().requires_grad_() for one in names}
            leaves |= {"g": decay.detach().requires_grad_()}
            leaves |= {} if beta is None else {"beta": beta.detach().requires_grad_()}
            with torch.enable_grad():
                y, end = scanned(kind, named | leaves, leaves["g"], leaves.get("beta"))
            outputs = ((y, do),) if dht is None else ((y, do), (end, dht))
            grads = torch.autograd.grad([one for one, _ in outputs], [*leaves.values()], [one for _, one in outputs])
            of = dict(zip(leaves, grads, strict=True))
            dq, dk, dv, dg, dbeta, dstate = (of.get(one) for one in ("q", "k", "v", "g", "beta", "initial_state"))
            if beta is None:
                return (dq, dk, dv, dg, dstate)
            return (dq, dk, dv, dbeta, dg, dstate, None, None)

        return called


def scanned(kind: Any, named: dict[str, Any], g: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    q, k, v, state = (named[one] for one in ("q", "k", "v", "initial_state"))
    assert all(x.is_contiguous() for x in (q, k, v, g))
    assert kind in ("delta", "channel delta") or k.shape[2] == v.shape[2]
    spec = ScanSpec(kind, named["scale"], k.shape[-1], v.shape[-1], states=True)

    def part(rows: Any, sample: Any, number: slice) -> tuple[Tensor, Tensor]:
        cut = [None if x is None else x[sample, rows] for x in (q, k, v, g, beta)]
        return recurrent_scan(*cut, spec, MixerInputs(None, None if state is None else state[number]))  # type: ignore[arg-type]

    if named["cu_seqlens"] is None:
        return part(slice(None), slice(None), slice(None))
    assert len(v) == 1
    assert named["chunk_indices"] is not None
    begins = named["cu_seqlens"].tolist()
    assert (begins[0], begins[-1]) == (0, v.shape[1])
    assert sorted(set(begins)) == begins
    found = [
        part(slice(first, last), slice(None), slice(number, number + 1))
        for number, (first, last) in enumerate(pairwise(begins))
    ]
    return torch.cat([y for y, _ in found], dim=1), torch.cat([end for _, end in found])


def summed(g: Tensor, *, chunk_size: int, cu_seqlens: Any, chunk_indices: Any, **_: Any) -> Tensor:
    """The fake kernels take decays, not their sums."""
    assert chunk_size == 64
    return g.clone()


def convolved(x: Tensor, weight: Tensor, bias: Any, *, residual: None, initial_state: Any, **named: Any) -> Any:
    begins = named["cu_seqlens"]
    states = None if initial_state is None else initial_state[..., 1:].transpose(1, 2)
    spec = ConvolutionSpec(weight.shape[1], named["activation"] == "silu", states=True)
    if begins is None:
        return short_convolution(x, weight, bias, spec, MixerInputs(None, states))[0], None
    places = begins.tolist()
    parts = [
        short_convolution(
            x[:, first:last], weight, bias, spec, MixerInputs(None, None if states is None else states[number][None])
        )[0]
        for number, (first, last) in enumerate(pairwise(places))
    ]
    return torch.cat(parts, dim=1), None


def convolved_backward(*, dy: Tensor, dht: None, **named: Any) -> Any:
    names = [one for one in ("x", "weight", "bias", "initial_state") if named[one] is not None]
    leaves = {one: named[one].detach().requires_grad_() for one in names}
    with torch.enable_grad():
        y, _ = convolved(**(named | leaves))
    of = dict(zip(names, torch.autograd.grad(y, [*leaves.values()], dy), strict=True))
    return of["x"], of["weight"], of.get("bias"), None, of.get("initial_state")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return made


def arguments(kind: Any, documents: bool, states: bool, dtype: torch.dtype = torch.float32) -> Any:
    """The leaves of a call, from one generator, and its specification; None for what the kind does not have."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    by_channel = (K,) if kind.startswith("channel") else ()
    q, k, v = drawn(B, S, G, K), drawn(B, S, G, K) / 3, drawn(B, S, H, V)
    decay = -drawn(B, S, H, *by_channel).abs()
    write = drawn(B, S, H).sigmoid() if "delta" in kind else None
    state = drawn(B, H, K, V) if states else None
    leaves = [None if x is None else x.requires_grad_() for x in (q.to(dtype), k.to(dtype), v.to(dtype), decay, write)]
    start = None if state is None else state.requires_grad_()
    spec = ScanSpec(kind, 0.3, K, V, documents=documents, states=states)
    return leaves, spec, MixerInputs(LENGTHS if documents else None, start)


def outcome(call: Any, kind: Any, documents: bool, states: bool) -> list[Tensor]:
    """Output, end state and the gradients of all inputs."""
    leaves, spec, inputs = arguments(kind, documents, states)
    y, end = call(*leaves, spec, inputs)
    outputs = [y, end] if states else [y]
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(4)) for x in outputs]
    given = [x for x in (*leaves, inputs.state) if x is not None]
    return [*outputs, *torch.autograd.grad(outputs, given, weights)]


@pytest.mark.parametrize("states", [False, True], ids=["alone", "states"])
@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_reaches_its_kernel_and_gives_outputs_end_states_and_all_gradients(
    library: Library, kind: Any, documents: bool, states: bool
) -> None:
    exact = outcome(recurrent_scan, kind, documents, states)
    for found, right in zip(outcome(scan, kind, documents, states), exact, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    rows = B * S if documents else S
    chunk = 64 if kind != "channel decay" else {9: 16, 18: 32}[rows]
    assert library.calls == [(kind, chunk, documents)]


@pytest.mark.parametrize("kind", ["decay", "delta"])
def test_a_decay_per_head_is_a_decay_of_all_channels(library: Library, kind: Any) -> None:
    exact = outcome(recurrent_scan, kind, True, True)
    for found, right in zip(outcome(scan_by_channel, kind, True, True), exact, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    assert library.calls[0][0] == f"channel {kind}"


@pytest.mark.wide("compile", quick=["channel delta-states"])
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("states", [False, True], ids=["alone", "states"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_scan_is_one_graph(kind: Any, states: bool) -> None:
    """Without states, a compiler hands zeros of no size to backward for the end state: the kernels must get None."""
    torch.compiler.reset()
    compiled = torch.compile(scan, backend="aot_eager", fullgraph=True)
    with catch_warnings(action="ignore"):
        found = outcome(compiled, kind, True, states)
    for one, right in zip(found, outcome(scan, kind, True, states), strict=True):
        torch.testing.assert_close(one, right, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("states", [False, True], ids=["alone", "states"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_passes_are_operators_as_torch_wants_them(kind: Any, states: bool) -> None:
    leaves, spec, inputs = arguments(kind, states, states)
    q, k, v, decay, write, state = (None if x is None else x.detach() for x in (*leaves, inputs.state))
    if kind in ("decay", "channel decay"):
        q, k = (x.repeat_interleave(H // G, dim=2) for x in (q, k))
    given = (kind, q, k, v, decay, write, state, inputs.document_lengths, spec.scale, states)
    y, end, *saved = forward_pass(*given)
    with catch_warnings(action="ignore"):
        torch.library.opcheck(forward_pass, given, test_utils=("test_schema", "test_faketensor"))
    passed = (kind, torch.randn_like(y), end if states else None, q, k, v, write, state, inputs.document_lengths)
    assert_fakes_are_right(backward_pass, (*passed, *saved, spec.scale))


def assert_fakes_are_right(operator: Any, given: tuple[Any, ...]) -> None:
    """Without `opcheck`, under which the fake kernels could not call autograd."""
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in given]
    with mode:
        guessed = operator(*fakes)
    for guess, real in zip(guessed, operator(*given), strict=True):
        assert (guess.shape, guess.dtype, guess.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.usefixtures("library")
def test_the_narrowest_format_is_that_of_the_products_and_y_has_that_of_the_values() -> None:
    (q, k, v, decay, write), spec, inputs = arguments("delta", False, False, torch.bfloat16)
    y, end = scan(q.float(), k.float(), v, decay, write, spec, inputs)
    assert y.dtype is torch.bfloat16
    assert end is None
    wide, _ = scan(q, k, v.float(), decay, write, spec, inputs)
    assert wide.dtype is torch.float32
    assert torch.equal(wide.to(torch.bfloat16), y)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("states", "documents", "bias", "compiled"),
    [
        *((states, documents, not states, False) for states in (False, True) for documents in (False, True)),
        (False, False, False, True),
        (True, True, True, True),
    ],
)
def test_convolutions_give_outputs_end_states_and_all_gradients(
    states: bool, documents: bool, bias: bool, compiled: bool
) -> None:
    generator = torch.Generator().manual_seed(5)
    wide, weight = torch.randn(B, S, C + 3, generator=generator), torch.randn(C, W, generator=generator)
    shift, state = torch.randn(C, generator=generator), torch.randn(B, W - 1, C, generator=generator)
    leaves = [x.requires_grad_() for x, there in ((wide, 1), (weight, 1), (shift, bias), (state, states)) if there]
    spec = ConvolutionSpec(W, silu=True, documents=documents, states=states)
    inputs = MixerInputs(LENGTHS if documents else None, state if states else None)
    call = convolution
    if compiled:
        torch.compiler.reset()
        call = torch.compile(convolution, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
    results = []
    for one in (call, short_convolution):
        with catch_warnings(action="ignore"):
            y, end = one(wide[..., 1 : C + 1], weight, shift if bias else None, spec, inputs)
        loss = y.square().sum() + (end.square().sum() if states and end is not None else 0)
        results.append([y, *([end] if states else []), *torch.autograd.grad(loss, leaves)])
    for found, right in zip(*results, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def test_documents_are_found_once_for_a_tensor_and_again_when_its_values_change() -> None:
    lengths = LENGTHS.clone()
    first = sequences(lengths)
    assert sequences(lengths) is first
    assert (first.begins.tolist(), first.firsts.tolist(), first.lasts.tolist()) == ([0, 2, 8, 9, 18], [0, 3], [2, 3])
    lengths[0] = torch.tensor([9, 0, 0, 0])
    assert sequences(lengths).begins.tolist() == [0, 9, 18]
