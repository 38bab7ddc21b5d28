"""Attention by Triton on a GPU: its numbers over the whole specification, its memory, more than 2^31 numbers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_bands import SPECS, Heads, assert_within_band, assert_within_bf16_band_of_views, inputs_of, spec_of
from torch import Tensor

from mplug_nn import AttentionInputs, AttentionSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # those of torch's compiler
]
if torch.cuda.is_available():
    from mplug_triton.attention import attention

S = 300
EVERYTHING: dict[str, Any] = {"window": 100, "documents": True, "soft_cap": 2.0, "sinks": True}
ALL_SPECS = [
    *(asked for asked in SPECS.values() if "value_width" not in asked),
    {"window": 100, "causal": False},
    {"position_groups": True},
    {"position_groups": True, "window": 20, "documents": True},
    {"soft_cap": 2.0},
    EVERYTHING,
    {**EVERYTHING, "causal": False},
    {**EVERYTHING, "position_groups": True},
]


def assert_near(core: Any, spec: AttentionSpec, dtype: torch.dtype) -> None:
    factor = 4 if dtype == torch.float32 else 2
    assert_within_band(core, spec, inputs_of(spec, dtype, S, 45), factor, factor * torch.finfo(dtype).eps)


@pytest.mark.parametrize("asked", ALL_SPECS, ids=str)
def test_each_specification_is_within_the_band_of_the_composition_in_fp64(asked: dict[str, Any]) -> None:
    assert_near(attention, spec_of(**asked), torch.bfloat16)


@pytest.mark.parametrize("asked", [{}, EVERYTHING, {**EVERYTHING, "causal": False}], ids=str)
def test_fp32_is_within_its_band(asked: dict[str, Any]) -> None:
    assert_near(attention, spec_of(**asked), torch.float32)


@pytest.mark.parametrize(
    ("width", "dtype"),
    [*((width, torch.bfloat16) for width in (24, 96, 128, 256)), (128, torch.float32), (64, torch.float16)],
)
def test_the_widths_that_it_supports_are_within_the_band(width: int, dtype: torch.dtype) -> None:
    assert_near(attention, spec_of(width, **EVERYTHING), dtype)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("heads", [Heads(2, 512, 8, 8, 128), Heads(1, 1000, 4, 1, 64), Heads(3, 131, 6, 2, 128)])
def test_views_of_a_packed_projection_are_within_the_bf16_band(heads: Heads, compiled: bool) -> None:
    core = torch.compile(attention, fullgraph=True, dynamic=False) if compiled else attention
    assert_within_bf16_band_of_views(core, heads)


def test_a_window_of_one_position_returns_values_and_has_no_gradients_of_queries_and_keys() -> None:
    """Those are exactly 0, so the bands above, which are relative, say nothing."""
    spec = AttentionSpec(0.1, 64, 64, window=1)
    leaves, grad = [drawn(2, S, 8, 64), drawn(2, S, 2, 64), drawn(2, S, 2, 64)], drawn(2, S, 8, 64, seed=1)
    output, dq, dk, dv = gradients(spec, leaves, grad)
    torch.testing.assert_close(output, leaves[2].repeat_interleave(4, dim=2), rtol=1e-2, atol=1e-2)
    shares = grad.double().unflatten(2, (2, 4)).sum(dim=3)
    torch.testing.assert_close(dv.double(), shares, rtol=2e-2, atol=2e-2)
    assert max(float(dq.abs().max()), float(dk.abs().max())) < 1e-4


def gradients(spec: AttentionSpec, leaves: list[Tensor], grad: Tensor, **inputs: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in leaves]
    output = attention(*leaves[:3], spec, AttentionInputs(sinks=leaves[3] if spec.sinks else None, **inputs))
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed), dtype=torch.bfloat16)


def test_all_results_have_the_same_bits_in_every_call() -> None:
    spec = AttentionSpec(0.1, 64, 64, **EVERYTHING)
    leaves = [drawn(2, 2000, 8, 64), drawn(2, 2000, 2, 64), drawn(2, 2000, 2, 64), drawn(8)]
    lengths = torch.tensor(((700, 1, 1299, 0), (2000, 0, 0, 0)), device="cuda")
    both = [gradients(spec, leaves, drawn(2, 2000, 8, 64, seed=1), document_lengths=lengths) for _ in range(2)]
    for one, other in zip(*both, strict=True):
        assert torch.equal(one, other)


def test_memory_grows_with_the_sequence_and_not_with_its_square() -> None:
    spec = AttentionSpec(0.1, 64, 64, window=1024, soft_cap=50.0, sinks=True)
    length, heads = 16384, 8
    leaves, grad = [*(drawn(1, length, heads, 64) for _ in range(3)), drawn(heads)], drawn(1, length, heads, 64)
    gradients(spec, leaves, grad)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients(spec, leaves, grad)
    used, size = torch.cuda.max_memory_allocated() - before, leaves[0].numel() * 2
    assert used < 6 * size < length**2  # a boolean mask of all pairs has length**2 bytes


@pytest.mark.parametrize("window", [128, 1024])
def test_the_last_rows_of_a_sequence_of_more_than_two_to_the_31_numbers_are_those_of_a_short_one(window: int) -> None:
    length, heads, groups, width = 270_000, 64, 8, 128
    assert length * heads * width > 2**31
    spec = AttentionSpec(0.1, width, width, window=window, sinks=True)
    packed = drawn(1, length, heads + 2 * groups, width)
    views, sinks, grad = (
        packed.split((heads, groups, groups), dim=2),
        drawn(heads),
        drawn(1, length, heads, width, seed=1),
    )
    found = gradients(spec, [*views, sinks], grad)
    last, seen = 600, 600 + window
    short = [x[:, -n:].contiguous() for x, n in zip(views, (last, seen, seen), strict=True)]
    right = gradients(replace(spec, own_key_length=True), [*short, sinks], grad[:, -last:].contiguous())
    rows = last - window if window < last else 1  # keys that only the last queries see
    for name, ours, exact, number in zip(
        ("output", "dq", "dk", "dv"), found, right, (last, last, rows, rows), strict=False
    ):
        torch.testing.assert_close(
            ours[:, -number:], exact[:, -number:], rtol=0, atol=2e-2, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_graph_that_is_captured_reads_its_documents_when_it_is_replayed() -> None:
    spec = AttentionSpec(0.1, 64, 64, documents=True)
    q, k, v = (drawn(2, S, heads, 64, seed=heads) for heads in (8, 2, 2))
    lengths = torch.tensor(((200, 1, 99, 0), (300, 0, 0, 0)), device="cuda")
    attention(
        q, k, v, spec, AttentionInputs(document_lengths=lengths)
    )  # compiles, and keeps the sight of these lengths
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = attention(q, k, v, spec, AttentionInputs(document_lengths=lengths))
    others = torch.tensor(((100, 100, 100, 0), (1, 298, 1, 0)), device="cuda")
    lengths.copy_(others)
    graph.replay()
    expected = attention(q, k, v, spec, AttentionInputs(document_lengths=others))
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
