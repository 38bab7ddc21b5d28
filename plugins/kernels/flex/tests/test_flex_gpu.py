"""flex_attention on a GPU: its numbers over the whole specification, its memory, and how often it compiles."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from mplug_flex import programs
from mplug_flex.attention import attention

from mplug_nn import AttentionInputs, AttentionSpec
from mplug_nn.attention import scaled_dot_product
from mplug_nn.core import parts_of
from mplug_nn.specification import ALIBI, RELATIVE
from mplug_testing import KernelSuite
from mplug_testing.attention_errors import Heads, attention_errors
from mplug_testing.capabilities import Setting, parts_fault
from mplug_testing.harness import train_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here"),
    pytest.mark.filterwarnings("ignore"),  # those of torch's compiler
]
HEADS_OF_64 = {"model.hidden_size": 128, "model.num_attention_heads": 2, "model.num_kv_heads": 1}
B, S, H, G, K, REACH = 2, 300, 8, 2, 64, 20
LENGTHS = ((200, 1, 99, 0), (300, 0, 0, 0))
SPECS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 100},
    "window, full": {"window": 100, "causal": False},
    "documents": {"documents": True},
    "documents, full": {"documents": True, "causal": False},
    "soft cap": {"soft_cap": 2.0},
    "sinks": {"sinks": True},
    "ALiBi": {"bias": ALIBI},
    "ALiBi, full": {"bias": ALIBI, "causal": False},
    "relative": {"bias": RELATIVE},
    "wider values": {"value_width": 128},
    "narrower values": {"value_width": 32},
    "more keys": {"own_key_length": True},
    "more keys, full": {"own_key_length": True, "causal": False},
    "everything": {"window": 100, "documents": True, "soft_cap": 2.0, "sinks": True, "bias": RELATIVE},
    "everything, full": {
        "window": 100,
        "documents": True,
        "soft_cap": 2.0,
        "sinks": True,
        "bias": RELATIVE,
        "causal": False,
        "value_width": 32,
    },
}


class TestFlexOnAGPU(KernelSuite):
    plugin = "flex"
    settings = {"trainer.device": "cuda", **HEADS_OF_64}
    dtypes = ("bf16", "fp32")
    deterministic = False  # the gradient of a relative bias


class TestDeterministicFlexOnAGPU(TestFlexOnAGPU):
    settings = {**TestFlexOnAGPU.settings, "trainer.deterministic": True}
    deterministic = True


def inputs_of(spec: AttentionSpec, dtype: torch.dtype, width: int = K) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """(q, k, v, then sinks and table if the specification has them; the remaining inputs by name)."""
    more = 45 if spec.own_key_length else 0
    shapes = [(B, S, H, width), (B, S + more, G, width), (B, S + more, G, spec.value_width)]
    shapes += [(H,)] if spec.sinks else []
    shapes += [(H, 2 * REACH + 1)] if spec.bias == RELATIVE else []
    generator = torch.Generator("cuda").manual_seed(S)
    leaves = [torch.randn(shape, device="cuda", generator=generator).to(dtype).requires_grad_() for shape in shapes]
    lengths = torch.tensor(LENGTHS, device="cuda") if spec.documents else None
    return leaves, {"document_lengths": lengths, "first_head": H, "num_heads": 2 * H}


def outcome(core: Any, spec: AttentionSpec, leaves: list[torch.Tensor], named: dict[str, Any]) -> list[torch.Tensor]:
    """The output and the gradients of all leaves."""
    trained = list(leaves[3:])
    sinks = trained.pop(0) if spec.sinks else None
    table = trained.pop(0) if spec.bias == RELATIVE else None
    output = core(*leaves[:3], spec, AttentionInputs(sinks=sinks, bias_table=table, **named))
    gradient = torch.randn(output.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    gradient = gradient.to(torch.bfloat16).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def assert_within_band(core: Any, spec: AttentionSpec, dtype: torch.dtype, width: int = K) -> None:
    """Relative errors against the composition in fp64 are at most twice (fp32: 4 times) those of it in `dtype`."""
    leaves, named = inputs_of(spec, dtype, width)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = outcome(scaled_dot_product, spec, wide, named)
    found, plain = (outcome(one, spec, leaves, named) for one in (core, scaled_dot_product))
    names = ["output", "dq", "dk", "dv", *(["dsinks"] if spec.sinks else []), *(["dtable"] if spec.bias else [])]
    for name, ours, usual, right in zip(names, found, plain, exact, strict=False):
        error, allowed = ((x.double() - right).norm() / right.norm() for x in (ours, usual))
        factor = 4 if dtype == torch.float32 else 2
        assert error <= max(factor * allowed, factor * torch.finfo(dtype).eps), (
            f"{name} is off by {error:.2e}; plain torch by {allowed:.2e}"
        )
        assert ours.dtype == usual.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("asked", SPECS)
def test_each_specification_is_within_the_band_of_the_composition_in_fp64(asked: str, dtype: torch.dtype) -> None:
    spec = AttentionSpec(**{"scale": K**-0.5, "key_width": K, "value_width": K, **SPECS[asked]})
    assert_within_band(attention, spec, dtype)


@pytest.mark.parametrize("asked", ["causal", "everything"])
def test_a_unit_that_inductor_compiles_is_within_the_band(asked: str) -> None:
    torch.compiler.reset()
    spec = AttentionSpec(**{"scale": K**-0.5, "key_width": K, "value_width": K, **SPECS[asked]})
    assert_within_band(torch.compile(attention, fullgraph=True, dynamic=False), spec, torch.bfloat16)


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
    assert_within_band(attention, AttentionSpec(width**-0.5, width, value_width), dtype, width)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("heads", [Heads(2, 512, 8, 8, 128), Heads(1, 1000, 4, 1, 64), Heads(3, 131, 6, 2, 128)])
def test_views_of_a_packed_projection_are_within_the_bf16_band(heads: Heads, compiled: bool) -> None:
    core = torch.compile(attention, fullgraph=True, dynamic=False) if compiled else attention
    for name, (error, usual) in attention_errors(core, heads, "cuda").items():
        assert error <= min(1e-2, 2 * usual), f"{name} is off by {error:.2e}; plain torch in bf16 by {usual:.2e}"


@pytest.mark.parametrize("heads", [(8, 8, 64), (8, 2, 128)], ids=["64 wide", "grouped"])
def test_parts_are_those_of_the_composition_in_fp64(heads: tuple[int, int, int]) -> None:
    assert parts_fault(parts_of(attention), Setting(*heads, torch.bfloat16, "cuda"), packed=True) == ""


@pytest.mark.parametrize("asked", [name for name, spec in SPECS.items() if spec.get("bias") != RELATIVE])
def test_without_a_relative_bias_equal_calls_give_equal_bits(asked: str) -> None:
    spec = AttentionSpec(**{"scale": K**-0.5, "key_width": K, "value_width": K, **SPECS[asked]})
    leaves, named = inputs_of(spec, torch.bfloat16)
    first, second = (outcome(attention, spec, leaves, named) for _ in range(2))
    assert all(map(torch.equal, first, second))


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
    lengths = torch.tensor(LENGTHS, device="cuda")
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
