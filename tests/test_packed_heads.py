"""Attention from packed heads: when a module uses it, what it computes, and what its backward no longer does.

B batch, S sequence, H query heads, G KV heads, K head dim, D embed.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import wraps
from typing import Any
from unittest import SkipTest
from warnings import catch_warnings

import pytest
import torch
from random_values import drawn, filled
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from mplug import Offer
from mplug_compile.tracer import prepare_compiler
from mplug_nn import (
    Attention,
    AttentionCore,
    AttentionInputs,
    AttentionSpec,
    PackedHeads,
    Part,
    Preparation,
    packed_heads_of,
)
from mplug_nn.attention import DOT_PRODUCT, prepare_qk, prepare_qkv, scaled_dot_product
from mplug_nn.cache import CacheSize
from mplug_nn.parts import PLAIN_PARTS
from mplug_nn.specification import KNOWN
from mplug_testing import Fault
from mplug_testing.kernel_cases.attention import attention_cases
from mplug_testing.kernel_checks import Trial
from mplug_testing.kernel_packed_heads import PackedHeadsChecks

B, S, H, G, K, D = 2, 7, 4, 2, 8, 24


# A third party's supplier, in plain torch and fp64, which writes the packed gradient itself.


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, sizes: list[int], spec: AttentionSpec, lengths: Tensor | None) -> Tensor:
        output, sums = PLAIN_PARTS.attend(_part(heads, sizes, spec, lengths))
        ctx.save_for_backward(heads, output, sums, lengths)
        ctx.sizes, ctx.spec = sizes, spec
        return output.to(heads.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        heads, output, sums, lengths = ctx.saved_tensors
        found = PLAIN_PARTS.differentiate(_part(heads, ctx.sizes, ctx.spec, lengths), grad, output, sums)
        packed = torch.empty_like(heads)
        for place, own in zip(packed.split(ctx.sizes, dim=2), found, strict=True):
            place.copy_(own)
        return packed, None, None, None


def _part(heads: Tensor, sizes: list[int], spec: AttentionSpec, lengths: Tensor | None) -> Part:
    of_both = None if lengths is None else (lengths, lengths)
    return Part(*heads.double().split(sizes, dim=2), spec.scale, spec.causal, of_both)


class AcmePacked(PackedHeads):
    offers = frozenset({"document_lengths", "full attention"})

    def __init__(self) -> None:
        self.calls = 0

    def attend(self, heads: Tensor, h: int, g: int, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        self.calls += 1
        y: Tensor = _Attention.apply(heads, [h, g, g], spec, inputs.document_lengths)  # type: ignore[no-untyped-call]
        return y


def acme() -> tuple[AttentionCore, AcmePacked]:
    """A supplier of `Attention.core`, and what it computes packed heads with."""
    packed = AcmePacked()
    return AttentionCore(scaled_dot_product, packed_heads=packed), packed


def attention(core: Callable[..., Tensor] = scaled_dot_product, made: type[Attention] = Attention, **named: Any) -> Any:
    module = filled(made(D, H, G, K, **{"bias": True, "qk_norm": False, "theta": None, **named}))
    for parameter in module.parameters():
        parameter.data.mul_(0.3)
    module.core = core
    return module


POSITIONS, KEYS = torch.arange(S)[None], torch.arange(B)
LENGTHS = torch.tensor([[3, 4, 0], [7, 0, 0]])


def outcome(
    module: Attention, lengths: Tensor | None = None, call: Callable[..., Tensor] | None = None
) -> list[Tensor]:
    """The output, and the gradients of the input and of all parameters."""
    x = drawn(B, S, D, seed=1).requires_grad_()
    with catch_warnings(action="ignore"):  # what torch's tracer warns of
        y = (module if call is None else call)(x, POSITIONS, KEYS, lengths)
        return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], drawn(*y.shape, seed=2))]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    prepare_compiler()
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# What it computes.

COMPILERS = ["never", "aot_eager", pytest.param("inductor", marks=pytest.mark.wide("compile"))]


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["one document", "documents"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.wide(
    "compile",
    quick=["causal-documents-never", "full-documents-never", "causal-one document-never", "full-one document-never"],
)
def test_the_output_and_all_gradients_are_those_of_the_plain_path(
    causal: bool, lengths: Tensor | None, compiler: str
) -> None:
    core, packed = acme()
    module = attention(core, causal=causal)
    call = module if compiler == "never" else torch.compile(module, backend=compiler, fullgraph=True)
    found = outcome(module, lengths, call)
    assert packed.calls == 1
    assert_same(found, outcome(attention(causal=causal), lengths))


def test_a_recomputed_forward_pass_gives_the_same_gradients() -> None:
    core, packed = acme()
    module = attention(core)
    found = outcome(module, call=lambda *given: checkpoint(module, *given, use_reentrant=False))
    assert packed.calls == 2
    assert_same(found, outcome(attention()))


def operators_of_backward(module: Attention) -> list[str]:
    names: list[str] = []

    def recorded(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    backend = aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=recorded)
    outcome(module, call=torch.compile(module, backend=backend, fullgraph=True))
    return names


@pytest.mark.wide("compile")
def test_no_concatenation_is_in_the_compiled_backward() -> None:
    plain, ours = operators_of_backward(attention()), operators_of_backward(attention(acme()[0]))
    assert plain.count("aten.cat.default") == 1, "there is something to save"
    assert ours
    assert "aten.cat.default" not in ours


# When a module uses it.


def stranger(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """A supplier of `prepare_qkv` that says nothing of itself."""
    q, k, v = prepare_qkv(*given)
    return q, 2 * k, v


def doubled(inner: Callable[..., Any]) -> Callable[..., Any]:
    """A wrap that copies the attributes of what it wraps."""

    @wraps(inner)
    def twice(*given: Any) -> Any:
        y = inner(*given)
        return 2 * y if isinstance(y, Tensor) else (y[0], 2 * y[1], *y[2:])

    return twice


AROUND: dict[str, tuple[str, Callable[..., Any]]] = {
    "a stranger's prepare_qkv": ("prepare_qkv", lambda _: stranger),
    "a wrap around prepare_qkv": ("prepare_qkv", lambda _: doubled(prepare_qkv)),
    "a wrap around prepare_qk": ("prepare_qk", lambda _: doubled(prepare_qk)),
    "a wrap around the core": ("core", doubled),
}


@pytest.mark.parametrize(("slot", "around"), AROUND.values(), ids=AROUND)
def test_what_may_change_queries_keys_values_or_the_result_is_called(slot: str, around: Callable[..., Any]) -> None:
    core, packed = acme()
    ours, plain = attention(core), attention()
    for module in (ours, plain):
        setattr(module, slot, around(getattr(module, slot)))
    assert_same(outcome(ours), outcome(plain))
    assert packed.calls == 0


OTHER: dict[str, dict[str, Any]] = {
    "rotary positions": {"theta": 1e4},
    "QK-norm": {"qk_norm": True},
    "QK-norm by an offset": {"qk_norm": True, "qk_norm_offset": True},
    "a window": {"window": 3},
    "attention sinks": {"sinks": True},
    "a soft cap": {"soft_cap": 2.0},
    "ALiBi": {"attention_bias": "alibi"},
    "dropout": {"dropout": 0.5},
}


@pytest.mark.parametrize("named", OTHER.values(), ids=OTHER)
def test_what_it_does_not_serve_takes_the_plain_path(named: dict[str, Any]) -> None:
    core, packed = acme()
    assert_same(outcome(attention(core, **named)), outcome(attention(**named)))
    assert packed.calls == 0


def test_a_module_with_a_cache_adds_to_it() -> None:
    core, packed = acme()
    packed.offers = KNOWN
    module, x = attention(core), drawn(B, S, D)
    expected = module(x, POSITIONS, KEYS)
    module.serve_cache()
    module.cache = module.new_cache(CacheSize(S))
    with torch.no_grad():
        torch.testing.assert_close(module(x, POSITIONS, KEYS), expected)
    assert packed.calls == 1


def test_a_supplier_of_prepare_qkv_that_says_it_passes_through_is_not_called() -> None:
    def prepare(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError("it is called")

    core, packed = acme()
    module = attention(core)
    module.prepare_qkv = Preparation(prepare, passes_through=True)
    assert_same(outcome(module), outcome(attention()))
    assert packed.calls == 1


def test_modules_that_may_call_or_need_something_else_have_the_plain_path() -> None:
    core, packed = acme()
    outcome(attention(core, made=type("Own", (Attention,), {})))
    assert packed.calls == 0
    core, packed = acme()
    assert_same(outcome(attention(core, dropout=0.5).eval()), outcome(attention(dropout=0.5).eval()))
    assert packed.calls == 1


@pytest.mark.parametrize(
    "more", [{"causal": False}, {"window": 2}, {"bias": "unheard of"}, {"own_key_length": True}, {"dropout": 0.1}]
)
def test_it_serves_only_needs_that_it_offers(more: dict[str, Any]) -> None:
    assert PackedHeads().serves(AttentionSpec(1.0, K, K))
    assert not PackedHeads().serves(AttentionSpec(1.0, K, K, **more))
    assert packed_heads_of(DOT_PRODUCT) is None


# What the suite of kernels says of it.


Attend = Callable[..., Tensor]


def split(heads: Tensor, h: int, g: int, *rest: Any) -> Tensor:
    return scaled_dot_product(*heads.split((h, g, g), dim=2), *rest)


def without_gradient_of_values(heads: Tensor, h: int, g: int, *rest: Any) -> Tensor:
    return split(torch.cat((heads[:, :, : h + g], heads[:, :, h + g :].detach()), 2), h, g, *rest)


def overwriting(heads: Tensor, *rest: Any) -> Tensor:
    y = split(heads.clone(), *rest)
    heads.detach().zero_()
    return y


def for_contiguous_heads(heads: Tensor, *rest: Any) -> Tensor:
    return split(heads.as_strided(heads.shape, heads.new_empty(heads.shape).stride()), *rest)


def packed_heads(attend: Attend = split, **attributes: Any) -> PackedHeads:
    """Packed heads by plain torch, or with a fault."""
    attributes = {"offers": AcmePacked.offers, "attend": lambda _, *given: attend(*given), **attributes}
    made: PackedHeads = type("Packed", (PackedHeads,), attributes)()
    return made


PACKED_FAULTS: dict[str, tuple[PackedHeads, str]] = {
    "a third party's": (AcmePacked(), ""),
    "plain torch": (packed_heads(), ""),
    "values have no gradient": (
        packed_heads(without_gradient_of_values),
        "from packed heads: the gradient of v has an error of",
    ),
    "documents are ignored": (
        packed_heads(lambda *given: split(*given[:-1], AttentionInputs())),
        "documents, from packed heads: the output has an error of",
    ),
    "heads are overwritten": (packed_heads(overwriting), "it changes its input 'packed heads' in place"),
    "heads are taken for contiguous": (
        packed_heads(for_contiguous_heads),
        "from packed heads: the output has an error of",
    ),
    "every bias is served": (packed_heads(serves=lambda *_: True), "`serves` returns True for 'a bias that does not"),
    "any number of keys is served": (
        packed_heads(offers=KNOWN, dropout=True),
        "queries, keys and values have different shapes",
    ),
}


class TrialsOf(PackedHeadsChecks):
    """The suite's check of one supplier."""

    plugin = "acme"

    def __init__(self, core: Callable[..., Tensor]) -> None:
        self.core = core

    def _offered(self, dtype: str | None = None) -> Any:
        return None, [Offer({"Attention.core": self.core})]

    def _trials(self, dtype: str, only: str | None = None) -> list[Trial]:
        suppliers = {"Attention.core": self.core}
        return [
            Trial(case, suppliers, torch.float32, "cpu", case.name) for case in attention_cases() if only in case.slots
        ]


@pytest.mark.parametrize(("packed", "words"), PACKED_FAULTS.values(), ids=PACKED_FAULTS)
@pytest.mark.wide(
    "suites", quick=["a third party's", "values have no gradient", "heads are overwritten", "every bias is served"]
)
def test_the_suite_says_what_is_wrong_with_packed_heads(packed: PackedHeads, words: str) -> None:
    checks = TrialsOf(AttentionCore(scaled_dot_product, packed_heads=packed))
    with pytest.raises(Fault) if words else nullcontext() as raised, catch_warnings(action="ignore"):
        checks.test_attention_from_packed_heads_is_that_of_plain_torch("fp32")
    assert raised is None or words in str(raised.value)


def test_the_suite_skips_a_core_without_packed_heads_and_refuses_those_that_serve_nothing() -> None:
    with pytest.raises(SkipTest, match="'acme' computes no attention from packed heads"):
        TrialsOf(scaled_dot_product).test_attention_from_packed_heads_is_that_of_plain_torch("fp32")
    idle = AttentionCore(scaled_dot_product, packed_heads=packed_heads(serves=lambda *_: False))
    with pytest.raises(Fault, match="serve none of the cases"):
        TrialsOf(idle).test_attention_from_packed_heads_is_that_of_plain_torch("fp32")
