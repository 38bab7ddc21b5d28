"""Scans and short convolutions compute the recurrences of their papers, in chunks, from a state and to a state."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mplug_nn import ConvolutionSpec, MixerInputs, ScanSpec, chunked_scan, recurrent_scan, short_convolution

EXACT = 1e-10
KINDS = ("decay", "channel decay", "delta", "channel delta")
B, G, H, K, V = 2, 2, 4, 5, 3
LENGTHS = (1, 16, 65, 150)
"""Lengths of one position, of a chunk, and lengths that chunks do not divide."""


@pytest.fixture(autouse=True)
def in_fp64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def spec_of(kind: Any, **more: bool) -> ScanSpec:
    return ScanSpec(kind, 0.7, K, V, **more)


def operands(kind: str, length: int) -> dict[str, Tensor | None]:
    """q, k, v, decay, write and a start state; some decays are so strong that unmasked differences overflow."""
    decay = -torch.rand(B, length, H, *([K] if "channel" in kind else [])) * 3
    decay[:, ::7] *= 300
    k = torch.nn.functional.normalize(torch.randn(B, length, G, K), dim=-1)
    return {
        "q": torch.randn(B, length, G, K),
        "k": k,
        "v": torch.randn(B, length, H, V),
        "decay": decay,
        "write": 2 * torch.rand(B, length, H) if "delta" in kind else None,
        "state": torch.randn(B, H, K, V),
    }


def documents(length: int) -> Tensor:
    """Documents of one token, of many, and empty places, in a different order in each sample."""
    first = [1, 1, max(length - 3, 0), 1, 0] if length > 3 else [length, 0, 0, 0, 0]
    second = [length // 2, 0, 1, length - length // 2 - 1, 0] if length > 1 else [0, length, 0, 0, 0]
    return torch.tensor([first, second])


def scanned(function: Any, kind: str, given: dict[str, Tensor | None], lengths: Tensor | None) -> list[Tensor]:
    """Output, end state, and the gradient of every operand."""
    leaves = {name: x.clone().requires_grad_() for name, x in given.items() if x is not None}
    q, k, v, decay, state = (leaves[name] for name in ("q", "k", "v", "decay", "state"))
    spec = spec_of(kind, documents=lengths is not None, states=True)
    y, end = function(q, k, v, decay, leaves.get("write"), spec, MixerInputs(lengths, state))
    weights = torch.linspace(-1, 2, y.numel()).view_as(y), torch.linspace(1, 2, end.numel()).view_as(end)
    (y * weights[0]).sum().add((end * weights[1]).sum()).backward()
    return [y, end, *(leaf.grad for leaf in leaves.values())]


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_compute_the_recurrence_and_its_gradients(kind: str, length: int, packed: bool) -> None:
    given, lengths = operands(kind, length), documents(length) if packed else None
    expected = scanned(recurrent_scan, kind, given, lengths)
    for found, wanted in zip(scanned(chunked_scan, kind, given, lengths), expected, strict=True):
        assert torch.isfinite(found).all()
        assert (found - wanted).abs().max() < EXACT * max(1.0, wanted.abs().max().item())


@pytest.mark.parametrize("kind", KINDS)
def test_the_recurrence_is_that_of_the_papers_by_hand(kind: str) -> None:
    given = operands(kind, 3)
    q, k, v, decay, write, state = (given[name] for name in ("q", "k", "v", "decay", "write", "state"))
    assert q is not None
    assert k is not None
    assert v is not None
    assert decay is not None
    assert state is not None
    y, _ = recurrent_scan(q, k, v, decay, write, spec_of(kind, states=True), MixerInputs(None, state))
    sample, head, s = 1, 3, state[1, 3]
    for place in range(3):
        key = k[sample, place, head // (H // G)]
        s = torch.diag(decay[sample, place, head].exp().expand(K)) @ s
        if write is not None:
            s = (torch.eye(K) - write[sample, place, head] * torch.outer(key, key)) @ s
        s = s + torch.outer(key, v[sample, place, head]) * (1 if write is None else write[sample, place, head])
        assert (y[sample, place, head] - 0.7 * q[sample, place, head // (H // G)] @ s).abs().max() < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_those_that_are_computed_alone(kind: str) -> None:
    given, lengths = operands(kind, 70), [1, 30, 1, 38]
    given["state"] = None
    tensors = [given[name] for name in ("q", "k", "v", "decay", "write")]
    packed = MixerInputs(torch.tensor([lengths, lengths]))
    y, end = chunked_scan(*tensors, spec_of(kind, documents=True), packed)  # type: ignore[arg-type]
    start = 0
    for length in lengths:
        own = [None if x is None else x[:, start : start + length] for x in tensors]
        alone, last = chunked_scan(*own, spec_of(kind))  # type: ignore[arg-type]
        assert (alone - y[:, start : start + length]).abs().max() < EXACT
        start += length
    assert (last - end).abs().max() < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_a_scan_of_two_parts_hands_its_state_on_and_is_linear_in_it(kind: str) -> None:
    given = operands(kind, 90)
    tensors = [given[name] for name in ("q", "k", "v", "decay", "write")]
    spec, state = spec_of(kind, states=True), given["state"]
    whole, end = chunked_scan(*tensors, spec, MixerInputs(None, state))  # type: ignore[arg-type]
    first, second = ([None if x is None else x[:, part] for x in tensors] for part in (slice(37), slice(37, None)))
    y, middle = chunked_scan(*first, spec, MixerInputs(None, state))  # type: ignore[arg-type]
    rest, last = chunked_scan(*second, spec, MixerInputs(None, middle))  # type: ignore[arg-type]
    assert (torch.cat((y, rest), dim=1) - whole).abs().max() < EXACT
    assert (last - end).abs().max() < EXACT


def test_low_precision_is_computed_in_fp32() -> None:
    given = operands("delta", 65)
    narrow = [None if x is None else x.bfloat16() for x in given.values()][:5]
    y, end = chunked_scan(*narrow, spec_of("delta"))  # type: ignore[arg-type]
    wide, _ = recurrent_scan(*(None if x is None else x.double() for x in narrow), spec_of("delta"))  # type: ignore[arg-type]
    assert (y.dtype, end.dtype) == (torch.bfloat16, torch.float32)
    assert (y - wide).abs().max() <= 0.004 * wide.abs().max(), "one rounding to bf16"


# Convolutions.


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Torch's own convolution of one document [S, C]."""
    channels, width = weight.shape
    if not len(x):
        return x
    y = torch.nn.functional.conv1d(x.T[None], weight[:, None], bias, padding=width - 1, groups=channels)
    return y[0, :, : len(x)].T


@pytest.mark.parametrize("lengths", [[9], [1, 1, 5, 2], [3, 0, 6, 0], [4, 4, 1, 0]])
def test_a_convolution_is_that_of_torch_within_each_document(lengths: list[int]) -> None:
    x, weight, bias = torch.randn(2, 9, 3), torch.randn(3, 4), torch.randn(3)
    leaves = [one.clone().requires_grad_() for one in (x, weight, bias)]
    spec, packed = ConvolutionSpec(4, silu=False, documents=True), torch.tensor([lengths, lengths])
    y, _ = short_convolution(*leaves, spec, MixerInputs(packed))
    others = [one.clone().requires_grad_() for one in (x, weight, bias)]
    parts = [[convolved(part, *others[1:]) for part in one.split(lengths)] for one in others[0]]
    expected = torch.stack([torch.cat(one) for one in parts])
    assert (y - expected).abs().max() < EXACT
    factors = torch.linspace(-1, 1, y.numel()).view_as(y)
    for found, wanted in zip(
        torch.autograd.grad((y * factors).sum(), leaves),
        torch.autograd.grad((expected * factors).sum(), others),
        strict=True,
    ):
        assert (found - wanted).abs().max() < EXACT
    silent, _ = short_convolution(x, weight, bias, ConvolutionSpec(4), MixerInputs(packed))
    assert (silent - torch.nn.functional.silu(expected)).abs().max() < EXACT


@pytest.mark.parametrize("cut", [1, 2, 3, 6])
def test_a_convolution_of_two_parts_hands_its_last_rows_on(cut: int) -> None:
    x, weight, lengths = torch.randn(1, 9, 3), torch.randn(3, 4), [5, 1, 3]
    spec = ConvolutionSpec(4, documents=True, states=True)
    whole, _ = short_convolution(x, weight, None, spec, MixerInputs(torch.tensor([lengths])))
    ends = [5, 6, 9]
    parts = [
        [max(0, min(end, to) - max(end - length, of)) for end, length in zip(ends, lengths, strict=True)]
        for of, to in ((0, cut), (cut, 9))
    ]
    y, state = short_convolution(x[:, :cut], weight, None, spec, MixerInputs(torch.tensor([parts[0]])))
    if cut in (5, 6):
        state = torch.zeros_like(state)  # the second part begins a document
    rest, _ = short_convolution(x[:, cut:], weight, None, spec, MixerInputs(torch.tensor([parts[1]]), state))
    assert (torch.cat((y, rest), dim=1) - whole).abs().max() < EXACT
