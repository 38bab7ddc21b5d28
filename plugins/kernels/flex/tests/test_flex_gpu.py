"""flex_attention on a GPU: its numbers over the whole specification, its memory, and how often it compiles."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_bands import SPECS, Heads, assert_within_band, assert_within_bf16_band_of_views, inputs_of, spec_of
from mplug_flex import programs
from mplug_flex.attention import attention

from mplug_nn import AttentionInputs, AttentionSpec
from mplug_nn.specification import ALIBI, RELATIVE
from mplug_testing import KernelSuite
from mplug_testing.harness import train_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # those of torch's compiler
]
HEADS_OF_64 = {"model.hidden_size": 128, "model.num_attention_heads": 2, "model.num_kv_heads": 1}
S, H, K = 300, 8, 64
EVERYTHING = {"window": 100, "documents": True, "soft_cap": 2.0, "sinks": True, "bias": RELATIVE}
ALL_SPECS = [
    *SPECS.values(),
    {"window": 100, "causal": False},
    {"position_groups": True},
    {"position_groups": True, "window": 20, "documents": True},
    {"soft_cap": 2.0},
    {"bias": ALIBI},
    {"bias": ALIBI, "causal": False},
    {"bias": RELATIVE},
    {"value_width": 128},
    EVERYTHING,
    {**EVERYTHING, "causal": False, "value_width": 32},
]


class TestFlexOnAGPU(KernelSuite):
    plugin = "flex"
    settings = {"trainer.device": "cuda", **HEADS_OF_64}
    dtypes = ("bf16", "fp32")
    deterministic = False  # the gradient of a relative bias


class TestDeterministicFlexOnAGPU(TestFlexOnAGPU):
    settings = {**TestFlexOnAGPU.settings, "trainer.deterministic": True}
    deterministic = True


def assert_near(core: Any, spec: AttentionSpec, dtype: torch.dtype) -> None:
    factor = 4 if dtype == torch.float32 else 2
    given = inputs_of(spec, dtype, S, 45)
    assert_within_band(core, spec, given, factor, factor * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("asked", ALL_SPECS, ids=str)
def test_each_specification_is_within_the_band_of_the_composition_in_fp64(
    asked: dict[str, Any], dtype: torch.dtype
) -> None:
    assert_near(attention, spec_of(**asked), dtype)


@pytest.mark.parametrize("asked", [{}, EVERYTHING], ids=str)
def test_a_unit_that_inductor_compiles_is_within_the_band(asked: dict[str, Any]) -> None:
    torch.compiler.reset()
    assert_near(torch.compile(attention, fullgraph=True, dynamic=False), spec_of(**asked), torch.bfloat16)


@pytest.mark.parametrize(
    ("width", "value_width", "dtype"),
    [
        *((width, width, torch.bfloat16) for width in (16, 24, 80, 128, 192, 256)),
        *((width, width, torch.float32) for width in (16, 80, 128, 192, 256)),
        (64, 64, torch.float16),
        (64, 256, torch.bfloat16),
        (256, 64, torch.bfloat16),
        (192, 128, torch.bfloat16),
        (64, 256, torch.float32),
    ],
)
def test_the_widths_that_it_supports_are_within_the_band(width: int, value_width: int, dtype: torch.dtype) -> None:
    assert_near(attention, spec_of(width, value_width=value_width), dtype)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("heads", [Heads(2, 512, 8, 8, 128), Heads(1, 1000, 4, 1, 64), Heads(3, 131, 6, 2, 128)])
def test_views_of_a_packed_projection_are_within_the_bf16_band(heads: Heads, compiled: bool) -> None:
    core = torch.compile(attention, fullgraph=True, dynamic=False) if compiled else attention
    assert_within_bf16_band_of_views(core, heads)


@pytest.mark.parametrize("compiler", ["never", "inductor"])
def test_a_run_compiles_each_direction_once_and_has_the_losses_of_plain_torch(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "PROGRAMS", {})
    settings = {**TestFlexOnAGPU.settings, "trainer.precision": "bf16", "data.documents": 3}
    settings["trainer.compile"] = compiler
    found = train_steps({**settings, "kernels.attention": "flex"})
    plain = train_steps({**settings, "kernels.default": None})
    assert found.losses == pytest.approx(plain.losses, rel=1e-2)
    assert [key[0] for key in programs.PROGRAMS] == ["forward", "backward"]


def test_memory_grows_with_the_sequence_and_not_with_its_square() -> None:
    spec = AttentionSpec(0.1, K, K, window=1024, soft_cap=50.0, sinks=True)
    length, heads = 16384, 8
    q, k, v = (torch.randn(1, length, heads, K, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    leaves = [x.requires_grad_() for x in (q, k, v, torch.zeros(heads, device="cuda", dtype=torch.bfloat16))]

    def once() -> None:
        output = attention(*leaves[:3], spec, AttentionInputs(sinks=leaves[3]))
        torch.autograd.grad(output, leaves, torch.ones_like(output))

    once()  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    once()
    used = torch.cuda.max_memory_allocated() - before
    assert used < 12 * q.numel() * q.element_size() < length**2  # a boolean mask of all pairs has length**2 bytes


def test_a_graph_that_is_captured_contains_the_masks_of_its_documents() -> None:
    spec = replace(AttentionSpec(0.1, K, K), documents=True)
    q, k, v = (torch.randn(2, S, H, K, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    lengths = torch.tensor(((200, 1, 99, 0), (300, 0, 0, 0)), device="cuda")
    inputs = AttentionInputs(document_lengths=lengths)
    attention(q, k, v, spec, inputs)  # compiles, and keeps the mask of these lengths
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = attention(q, k, v, spec, inputs)
    others = torch.tensor(((100, 100, 100, 0), (1, 298, 1, 0)), device="cuda")
    lengths.copy_(others)
    graph.replay()
    expected = attention(q, k, v, spec, AttentionInputs(document_lengths=others))
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
