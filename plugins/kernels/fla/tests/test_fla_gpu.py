"""The kernels of flash-linear-attention on a GPU, against the recurrence in fp64.

B samples, S positions, G key heads, H value heads, K key width, V value width, C channels.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from mplug_fla import limits
from mplug_fla.convolution import convolution
from mplug_fla.scans import scan, scan_by_channel
from torch import Tensor

from mplug_nn import ConvolutionSpec, MixerInputs, ScanSpec, recurrent_scan, short_convolution
from mplug_testing import KernelSuite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # those of compilers
]
KINDS = ("decay", "channel decay", "delta", "channel delta")
HYBRID: dict[str, Any] = {
    "model.name": "llama",
    "model.hidden_size": 64,
    "model.num_attention_heads": 2,
    "model.num_kv_heads": 1,
    "model.ffn_hidden_size": 96,
    "model.mixer_types": ["gated_delta", "mamba2", "kimi_delta", "gated_linear"],
    "model.num_layers": 4,
    "model.linear_num_key_heads": 2,
    "model.linear_num_value_heads": 2,
    "model.linear_key_head_dim": 32,
    "model.linear_value_head_dim": 32,
}
BAND, BAND_OF_DECAYS = 0.012, 0.025
"""The largest error of a result in bf16, as a share of its norm; gradients of decays are differences of large sums."""
LONG = 200  # three chunks of 64, and 8 positions


class TestFlaOnAGPU(KernelSuite):
    plugin = "fla"
    settings = {"trainer.device": "cuda", **HYBRID}
    dtypes = ("bf16",)


@pytest.fixture(autouse=True)
def library() -> None:
    if limits.missing():
        pytest.skip(limits.missing())


def supplier_of(spec: ScanSpec) -> Any:
    return scan_by_channel if limits.takes_channels(spec) else scan


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def leaves_of(spec: ScanSpec, length: int, heads: tuple[int, int], states: bool, strength: float) -> Any:
    """Arguments in bf16 (decays, write strengths and states in fp32), and the start state or None."""
    groups, values = heads
    by_channel = (spec.key_width,) if spec.by_channel else ()
    q, k = (drawn(2, length, groups, spec.key_width, seed=seed) for seed in (1, 2))
    v = drawn(2, length, values, spec.value_width, seed=3)
    decay = -strength * drawn(2, length, values, *by_channel, seed=4).abs()
    write = drawn(2, length, values, seed=5).sigmoid() if spec.corrects else None
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    state = drawn(2, values, spec.key_width, spec.value_width, seed=6) if states else None
    return [*(x.to(torch.bfloat16) for x in (q, k, v)), decay, write, state]


def results(call: Any, leaves: Any, spec: Any, lengths: Tensor | None, wide: bool) -> dict[str, Tensor]:
    given = [None if x is None else (x.double() if wide else x).detach().requires_grad_() for x in leaves]
    y, end = call(*given[:-1], spec, MixerInputs(lengths, given[-1]))
    outputs = {"y": y, "end": end} if spec.states else {"y": y}
    weights = [drawn(*x.shape, seed=7 + place).to(x.dtype) for place, x in enumerate(outputs.values())]
    names = ("q", "k", "v", "decay", "write", "state")
    named = {name: x for name, x in zip(names, given, strict=True) if x is not None}
    grads = torch.autograd.grad([*outputs.values()], [*named.values()], weights)
    return outputs | {f"the gradient of {name}": one for name, one in zip(named, grads, strict=True)}


def assert_within_bands(found: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    errors = {
        name: float((found[name].double() - right).norm() / right.norm().clamp(min=1e-12))
        for name, right in exact.items()
    }
    beyond = {
        name: error
        for name, error in errors.items()
        if not error < (BAND_OF_DECAYS if name == "the gradient of decay" else BAND)
    }
    assert not beyond, f"{beyond} of {errors}"


CASES: dict[str, dict[str, Any]] = {
    "one chunk": {"length": 64},
    "shorter than a chunk": {"length": 21},
    "a length that the chunk does not divide": {"length": LONG},
    "states in and out": {"length": LONG, "states": True},
    "documents": {"length": LONG, "documents": [[70, 129, 1], [200, 0, 0]]},
    "documents and states": {"length": LONG, "states": True, "documents": [[1, 64, 135], [3, 100, 97]]},
    "grouped keys": {"length": LONG, "heads": (2, 4), "states": True},
    "widths that are no powers of two": {"length": LONG, "widths": (48, 80)},
    "wide values, as context parallelism has them": {"length": LONG, "widths": (128, 256), "states": True},
    "strong decays": {"length": LONG, "strength": 20.0, "states": True},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_all_gradients_are_within_the_bf16_band_of_the_recurrence(kind: Any, name: str) -> None:
    case = {"heads": (2, 2), "widths": (64, 64), "states": False, "documents": None, "strength": 0.1} | CASES[name]
    lengths = None if case["documents"] is None else torch.tensor(case["documents"]).cuda()
    spec = ScanSpec(kind, 0.125, *case["widths"], documents=lengths is not None, states=case["states"])
    leaves = leaves_of(spec, case["length"], case["heads"], case["states"], case["strength"])
    found = results(supplier_of(spec), leaves, spec, lengths, wide=False)
    assert_within_bands(found, results(recurrent_scan, leaves, spec, lengths, wide=True))


@pytest.mark.parametrize("kind", ["decay", "delta"])
def test_decays_of_heads_by_the_kernels_for_channels_are_within_the_band(kind: Any) -> None:
    lengths = torch.tensor([[70, 129, 1], [200, 0, 0]]).cuda()
    spec = ScanSpec(kind, 0.125, 64, 64, documents=True, states=True)
    leaves = leaves_of(spec, LONG, (2, 4), True, 0.1)
    found = results(scan_by_channel, leaves, spec, lengths, wide=False)
    assert_within_bands(found, results(recurrent_scan, leaves, spec, lengths, wide=True))


@pytest.mark.parametrize("kind", KINDS)
def test_two_calls_that_pass_the_state_on_are_one(kind: Any) -> None:
    spec = ScanSpec(kind, 0.125, 64, 64, states=True)
    call, leaves = supplier_of(spec), leaves_of(ScanSpec(kind, 0.125, 64, 64), 150, (2, 2), False, 0.1)[:5]
    whole, end = call(*leaves, spec, MixerInputs())
    first, state = call(*(None if x is None else x[:, :90] for x in leaves), spec, MixerInputs())
    second, last = call(*(None if x is None else x[:, 90:] for x in leaves), spec, MixerInputs(None, state))
    assert_within_bands({"y": torch.cat((first, second), 1), "end": last}, {"y": whole.double(), "end": end.double()})


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_scan_is_one_graph_and_the_same(kind: Any) -> None:
    torch.compiler.reset()
    spec = ScanSpec(kind, 0.125, 64, 64, states=True)
    leaves, call = leaves_of(spec, LONG, (2, 2), True, 0.1), supplier_of(spec)
    eager = results(call, leaves, spec, None, wide=False)
    compiled = results(torch.compile(call, fullgraph=True, dynamic=False), leaves, spec, None, wide=False)
    for name, right in eager.items():
        torch.testing.assert_close(compiled[name], right, rtol=2e-2, atol=2e-2, msg=name)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("states", [False, True], ids=["alone", "states"])
@pytest.mark.parametrize("silu", [False, True], ids=["linear", "silu"])
@pytest.mark.parametrize("width", [2, 4])
def test_convolutions_of_views_are_within_the_bf16_band(
    width: int, silu: bool, states: bool, documents: bool, compiled: bool
) -> None:
    torch.compiler.reset()
    channels, kinds = 96, torch.bfloat16
    lengths = torch.tensor([[70, 129, 1], [2, 198, 0]]).cuda() if documents else None
    spec = ConvolutionSpec(width, silu, documents=documents, states=states)
    wide = drawn(2, LONG, channels + 40, seed=1).to(kinds)
    others = [drawn(channels, width, seed=2).to(kinds), drawn(channels, seed=3).to(kinds)]
    state = drawn(2, width - 1, channels, seed=4).to(kinds) if states else None

    def computed(call: Any, exact: bool) -> dict[str, Tensor]:
        given = [
            None if x is None else (x.double() if exact else x).detach().requires_grad_()
            for x in (wide, *others, state)
        ]
        x, weight, bias, start = given
        assert x is not None
        y, end = call(x[..., 8 : 8 + channels], weight, bias, spec, MixerInputs(lengths, start))
        outputs = {"y": y, "end": end} if states else {"y": y}
        leaves = [one for one in given if one is not None]
        weights = [drawn(*one.shape, seed=5).to(one.dtype) for one in outputs.values()]
        grads = torch.autograd.grad([*outputs.values()], leaves, weights)
        return outputs | {f"gradient {place}": one for place, one in enumerate(grads)}

    call = torch.compile(convolution, fullgraph=True, dynamic=False) if compiled else convolution
    assert_within_bands(computed(call, False), computed(short_convolution, True))


def test_a_step_of_one_position_is_the_recurrence() -> None:
    spec = ScanSpec("delta", 0.125, 64, 64, states=True)
    leaves = leaves_of(replace(spec), 1, (2, 4), True, 0.1)
    found = results(supplier_of(spec), leaves, spec, None, wide=False)
    assert_within_bands(found, results(recurrent_scan, leaves, spec, None, wide=True))
