"""Windows, soft caps and attention sinks of flash-attn-4 on a GPU: its numbers, and training steps of two families.

B batch, S sequence, H query heads, G KV heads, K head dim.
"""

import math
from functools import cache
from typing import Any

import pytest
import torch
from attention_bands import assert_within_band, inputs_of, spec_of
from gpus import STEPS, Step, trained_steps
from mplug_flash import Flash
from mplug_flash.attention import core
from mplug_flash.versions import VERSIONS
from offers import attention as site
from offers import run
from torch import Tensor

from mplug.model.build import build_model
from mplug_nn import AttentionInputs, AttentionSpec
from mplug_testing.harness import tiny_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # those of flash-attn and of compilers
]
S = 300
EVERYTHING: dict[str, Any] = {"window": 100, "documents": True, "soft_cap": 2.0, "sinks": True}
SPECS: list[dict[str, Any]] = [
    {"window": 100},
    {"window": 2},
    {"window": 100, "causal": False},
    {"window": 1000},
    {"window": 100, "documents": True},
    {"soft_cap": 2.0},
    {"soft_cap": 2.0, "documents": True, "causal": False},
    {"sinks": True},
    {"sinks": True, "documents": True},
    {"window": 100, "sinks": True},
    {"window": 100, "soft_cap": 2.0},
    EVERYTHING,
    {**EVERYTHING, "causal": False},
]


@pytest.fixture(autouse=True)
def served() -> None:
    """Skip a machine that cannot run it."""
    offer = Flash(Flash.Config(version=4)).offer(run())[0]
    answer = offer.answer(site("window", "soft cap", "attention sinks", "document_lengths"), run())
    if not VERSIONS[4].installed or answer is not True:
        pytest.skip(str(answer))


def assert_near(call: Any, spec: AttentionSpec, dtype: torch.dtype = torch.bfloat16) -> None:
    assert_within_band(call, spec, inputs_of(spec, dtype, S, 0), 2, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("asked", SPECS, ids=str)
def test_each_specification_is_within_the_band_of_the_composition_in_fp64(asked: dict[str, Any]) -> None:
    assert_near(core(4, False), spec_of(**asked))


@pytest.mark.parametrize(
    "asked", [{"window": 100, "soft_cap": 2.0}, {"window": 100, "sinks": True}, EVERYTHING], ids=str
)
@pytest.mark.parametrize(("width", "dtype"), [(96, torch.bfloat16), (128, torch.bfloat16), (64, torch.float16)])
def test_widths_and_fp16_are_within_the_band(width: int, dtype: torch.dtype, asked: dict[str, Any]) -> None:
    assert_near(core(4, False), spec_of(width, **asked), dtype)


@pytest.mark.parametrize("asked", [{"window": 100, "soft_cap": 2.0}, EVERYTHING], ids=str)
def test_it_is_within_the_band_compiled(asked: dict[str, Any]) -> None:
    torch.compiler.reset()
    assert_near(torch.compile(core(4, False), fullgraph=True, dynamic=False), spec_of(**asked))


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def gradients(
    spec: AttentionSpec, leaves: list[Tensor], grad: Tensor, deterministic: bool = False, **inputs: Any
) -> Any:
    leaves = [x.detach().requires_grad_() for x in leaves]
    sinks = leaves[3] if spec.sinks else None
    output = core(4, deterministic)(*leaves[:3], spec, AttentionInputs(sinks=sinks, **inputs))
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def test_a_window_of_one_position_returns_values_and_has_no_gradients_of_queries_and_keys() -> None:
    """Those are exactly 0, so the bands above, which are relative, say nothing."""
    spec = AttentionSpec(0.1, 64, 64, window=1)
    leaves, grad = [drawn(2, S, 8, 64), drawn(2, S, 2, 64), drawn(2, S, 2, 64)], drawn(2, S, 8, 64, seed=1)
    output, dq, dk, dv = gradients(spec, leaves, grad)
    torch.testing.assert_close(output, leaves[2].repeat_interleave(4, dim=2), rtol=1e-2, atol=1e-2)
    shares = grad.double().unflatten(2, (2, 4)).sum(dim=3)
    torch.testing.assert_close(dv.double(), shares, rtol=2e-2, atol=2e-2)
    assert max(float(dq.abs().max()), float(dk.abs().max())) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_of_sinks_follows_from_the_log_sum_exp_in_every_dtype_of_sinks(dtype: torch.dtype) -> None:
    """A sink s has the weight exp(s - log-sum-exp) and no value: its gradient sums -weight (output . grad)."""
    from mplug_flash.fourth import forward

    spec = AttentionSpec(0.1, 64, 64, window=128, sinks=True)
    leaves = [drawn(2, 2000, 8, 64), drawn(2, 2000, 2, 64), drawn(2, 2000, 2, 64), drawn(8, dtype=dtype)]
    grad = drawn(2, 2000, 8, 64, seed=1)
    output, *_, found = gradients(spec, leaves, grad)
    _, sums = forward(*leaves[:3], 0.1, False, True, None, leaves[3], 128, None)
    weights = (leaves[3].double()[:, None] - sums.double()).exp()  # [B, H, S]
    inner = (output.double() * grad.double()).sum(dim=3).transpose(1, 2)
    exact = -(weights * inner).sum(dim=(0, 2))
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2 * float(exact.abs().max()))
    assert found.dtype == dtype


def test_a_deterministic_backward_gives_the_same_bits() -> None:
    spec = AttentionSpec(0.1, 64, 64, **EVERYTHING)
    leaves = [drawn(2, 2000, 8, 64), drawn(2, 2000, 2, 64), drawn(2, 2000, 2, 64), drawn(8)]
    lengths = torch.tensor(((700, 1, 1299, 0), (2000, 0, 0, 0)), device="cuda")
    grad = drawn(2, 2000, 8, 64, seed=1)
    both = [gradients(spec, leaves, grad, True, document_lengths=lengths) for _ in range(2)]
    for one, other in zip(*both, strict=True):
        assert torch.equal(one, other)


def test_a_graph_that_is_captured_reads_its_documents_when_it_is_replayed() -> None:
    spec = AttentionSpec(0.1, 64, 64, **EVERYTHING)
    q, k, v, sinks = *(drawn(2, S, heads, 64, seed=heads) for heads in (8, 2, 2)), drawn(8)
    lengths = torch.tensor(((200, 1, 99, 0), (300, 0, 0, 0)), device="cuda")

    def attend(documents: Tensor) -> Tensor:
        return core(4, False)(q, k, v, spec, AttentionInputs(sinks=sinks, document_lengths=documents))

    attend(lengths)  # compiles
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = attend(lengths)
    others = torch.tensor(((100, 100, 100, 0), (1, 298, 1, 0)), device="cuda")
    lengths.copy_(others)
    graph.replay()
    torch.testing.assert_close(output, attend(others), rtol=0, atol=0)


# Training steps.

SIZES = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_kv_heads": 2, "vocab_size": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {
        **SIZES,
        "head_dim": 64,
        "ffn_hidden_size": 192,
        "window": 48,
        "attention_types": ["window", "full"],
        "attention_soft_cap": 2.0,
        "logit_soft_cap": 30.0,
        "init_std": 0.06,
    },
    "gpt-oss": {
        **SIZES,
        "head_dim": 64,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_ffn_hidden_size": 64,
        "window": 48,
        "init_std": 0.06,
    },
}


@cache
def expected(name: str, documents: int, micro_batches: int, folder: Any) -> list[Step]:
    """The steps in fp32 on the CPU, in plain torch."""
    exact = {"trainer.precision": "fp32", "trainer.device": "cpu", "trainer.compile": "never"}
    return trained_steps(
        folder / "exact", {**settings(name, documents, micro_batches), **exact, "kernels.attention": None}
    )


def settings(name: str, documents: int, micro_batches: int) -> dict[str, Any]:
    return {
        "model.name": name,
        "model.preset": None,
        **{f"model.{field}": value for field, value in FAMILIES[name].items()},
        "data.name": "mock",
        "data.documents": documents,
        "trainer.seq_length": 256,
        "trainer.global_batch_size": 4,
        "trainer.micro_batch_size": 4 // micro_batches,
        "schedule.warmup_steps": 2,
    }


@pytest.mark.parametrize("compiler", ["never", "auto"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("documents", [1, 5])
@pytest.mark.parametrize("name", FAMILIES)
def test_three_steps_have_the_losses_and_norms_of_plain_torch_in_fp32(
    tmp_path: Any, tmp_path_factory: Any, name: str, documents: int, micro_batches: int, compiler: str
) -> None:
    if compiler == "auto" and (documents, micro_batches) != (5, 2):
        pytest.skip("compiled in one case")
    own = {"trainer.precision": "bf16", "trainer.device": "cuda", "trainer.compile": compiler}
    found = trained_steps(tmp_path, {**settings(name, documents, micro_batches), **own, "kernels.attention": "flash"})
    exact = expected(name, documents, micro_batches, tmp_path_factory.getbasetemp())
    assert len(found) == STEPS
    assert all(math.isfinite(figure) for step in found for figure in step)
    for (loss, norm), (right, right_norm) in zip(found, exact, strict=True):
        assert loss == pytest.approx(right, rel=0.005)
        assert norm == pytest.approx(right_norm, rel=0.04)


@pytest.mark.parametrize("documents", [1, 5])
@pytest.mark.parametrize("name", FAMILIES)
def test_of_a_list_of_default_kernels_it_is_the_fastest(name: str, documents: int) -> None:
    own = {
        "trainer.precision": "bf16",
        "trainer.device": "cuda",
        "kernels.default": ["flash", "sdpa", "triton", "flex"],
    }
    filled = build_model(tiny_run({**settings(name, documents, 1), **own})).slots
    labels = {one.supplier_label(run()) for one in filled if one.site.slot == "Attention.core"}
    assert labels == {"kernels/flash (flash-attn-4)"}
