"""Attention as a specification: what it computes, what a site needs, and samples that are packed with documents.

B batch, S queries, T keys, H query heads, G KV heads, K head dim.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from plain_attention import attend
from random_values import drawn
from torch import Tensor, nn

from mplug import UsageError
from mplug.model.build import build_model
from mplug.model.model import Model
from mplug.model.slots.fill import sites
from mplug.training.assembly import build
from mplug_nn import Attention, AttentionInputs, AttentionSpec, scaled_dot_product
from mplug_nn.attention import needs_of_specification
from mplug_nn.parts import PLAIN_PARTS, numbered
from mplug_nn.specification import bias_of
from mplug_testing.capabilities import Setting, parts_fault
from mplug_testing.harness import tiny_run
from mplug_testing.samples import malformed

H, G, K, V, R = 4, 2, 6, 10, 2
SPEC = AttentionSpec(0.7, K, K)
SPECS = {
    "plain": SPEC,
    "full": replace(SPEC, causal=False),
    "window": replace(SPEC, window=3),
    "window of all": replace(SPEC, causal=False, window=2),
    "documents": replace(SPEC, documents=True, window=4),
    "documents of all": replace(SPEC, documents=True, causal=False),
    "cap": replace(SPEC, soft_cap=1.5),
    "sinks": replace(SPEC, sinks=True),
    "alibi": replace(SPEC, bias="alibi"),
    "alibi of all": replace(SPEC, bias="alibi", causal=False),
    "relative": replace(SPEC, bias="relative", soft_cap=3.0),
    "groups": replace(SPEC, position_groups=True, documents=True),
    "groups in windows": replace(SPEC, position_groups=True, window=2),
    "groups and more keys": replace(SPEC, position_groups=True, window=3, own_key_length=True),
    "values": replace(SPEC, value_width=V),
    "keys": replace(SPEC, own_key_length=True, window=5, bias="alibi"),
    "keys of all": replace(SPEC, own_key_length=True, causal=False, bias="relative"),
}
LENGTHS = [[3, 5, 0], [1, 1, 6]]
GROUPS = [[-1, 0, 0, 0, 1, 1, -1, 2], [0, 0, 0, 0, 0, 0, -1, -1]]


def one_by_one(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    """The definition, a query at a time, in Python."""
    b, s, h, _ = q.shape
    output, ahead = torch.zeros(b, s, h, spec.value_width, dtype=q.dtype), k.shape[1] - s
    for row in range(b):
        ends = torch.tensor(LENGTHS[row]).cumsum(0).tolist()
        document = [sum(position >= end for end in ends) for position in range(k.shape[1])]
        groups = [-1] * ahead + ([-1] * s if inputs.position_groups is None else inputs.position_groups[row].tolist())
        for query in range(s):
            at = query + ahead
            after = {key for key in range(at + 1, k.shape[1]) if groups[key] == groups[at] >= 0}
            seen = [
                key
                for key in range(k.shape[1])
                if (key <= at or not spec.causal or key in after)
                and (spec.window is None or abs(key - at) < spec.window or key in after)
                and (not spec.documents or document[key] == document[at])
            ]
            for head in range(h):
                group = head // (h // k.shape[2])
                scores = []
                for key in seen:
                    score = spec.scale * float(q[row, query, head] @ k[row, key, group])
                    if spec.soft_cap is not None:
                        score = spec.soft_cap * math.tanh(score / spec.soft_cap)
                    if spec.bias == "alibi":  # 8 heads in the whole model: head n of 1 to 8 has the slope 2^-n
                        score -= 2.0 ** -(inputs.first_head + head + 1) * abs(key - at)
                    if spec.bias == "relative":
                        assert inputs.bias_table is not None
                        score += float(inputs.bias_table[head, max(-R, min(R, key - at)) + R])
                    scores.append(math.exp(score))
                total = sum(scores)
                if spec.sinks:
                    assert inputs.sinks is not None
                    total += math.exp(float(inputs.sinks[head]))
                for weight, key in zip(scores, seen, strict=True):
                    output[row, query, head] += weight / total * v[row, key, group]
    return output


def given(spec: AttentionSpec) -> tuple[tuple[Tensor, Tensor, Tensor], AttentionInputs]:
    s, t = (3, 8) if spec.own_key_length else (8, 8)
    qkv = drawn(2, s, H, K), drawn(2, t, G, K, seed=1), drawn(2, t, G, spec.value_width, seed=2)
    inputs = AttentionInputs(
        document_lengths=torch.tensor(LENGTHS) if spec.documents else None,
        sinks=drawn(H, seed=3) if spec.sinks else None,
        bias_table=drawn(H, 2 * R + 1, seed=4) if spec.bias == "relative" else None,
        first_head=4,
        num_heads=8,
        position_groups=torch.tensor(GROUPS)[:, :s] if spec.position_groups else None,
    )
    return qkv, inputs


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_composition_in_plain_torch_computes_what_the_specification_says(spec: AttentionSpec) -> None:
    qkv, inputs = given(spec)
    expected = one_by_one(*qkv, spec, inputs)
    torch.testing.assert_close(scaled_dot_product(*qkv, spec, inputs), expected, rtol=1e-12, atol=1e-12)


def test_what_is_trained_gets_a_gradient() -> None:
    spec = replace(SPEC, sinks=True, bias="relative")
    qkv, inputs = given(spec)
    trained = [x.requires_grad_() for x in (inputs.sinks, inputs.bias_table) if x is not None]
    assert torch.autograd.gradcheck(lambda *_: scaled_dot_product(*qkv, spec, inputs), trained)


def test_slopes_of_heads_are_those_of_the_paper_and_other_biases_are_refused() -> None:
    """Six heads: those of four, 4^-n, and two of eight's: 2^-1 and 2^-3 (the paper's own rule)."""
    from mplug_nn.specification import alibi_slopes

    slopes = [4.0**-1, 4.0**-2, 4.0**-3, 4.0**-4, 2.0**-1, 2.0**-3]
    assert alibi_slopes(torch.arange(6), 6).tolist() == slopes
    qkv, inputs = given(SPEC)
    with pytest.raises(ValueError, match="a bias 'rings'"):
        scaled_dot_product(*qkv, replace(SPEC, bias="rings"), inputs)
    with pytest.raises(ValueError, match="a bias 'alibi'"):  # of how many heads?
        scaled_dot_product(*qkv, replace(SPEC, bias="alibi"), inputs._replace(num_heads=None))


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, set()),
        ({"dropout": 0.1}, set()),
        ({"causal": False, "documents": True}, {"full attention", "document_lengths"}),
        ({"window": 3, "soft_cap": 2.0, "sinks": True}, {"window", "soft cap", "attention sinks"}),
        ({"bias": "alibi"}, {"alibi bias"}),
        ({"bias": "rings"}, {"rings bias"}),
        ({"value_width": V, "own_key_length": True}, {"value width", "key length"}),
        ({"position_groups": True, "window": 3}, {"position groups", "window"}),
    ],
)
def test_whatever_is_not_plain_is_a_need(changes: dict[str, Any], needs: set[str]) -> None:
    assert replace(SPEC, **changes).needs == needs


def test_a_module_needs_what_its_specification_says_without_repeating_it() -> None:
    class Forgetful(Attention):
        def needs(self, slot: str, entries: Any) -> frozenset[str]:
            return frozenset()

    with torch.device("meta"):
        module = nn.Sequential(Forgetful(8, 2, 2, 4, bias=False, qk_norm=False, theta=None, window=4))
    found = {site.slot: site.needs for site in sites(module, ("document_lengths",))}
    assert found["Attention.core"] == {"window", "document_lengths"}
    assert found["Attention.prepare_qk"] == frozenset()
    with torch.device("meta"):
        module = Attention(8, 2, 2, 4, bias=False, qk_norm=False, theta=None, causal=False)
    assert needs_of_specification(module, ("document_lengths",)) == {"document_lengths", "full attention"}
    assert module.needs("Attention.prepare_qk", ("document_lengths",)) == frozenset()


# Documents: who says that samples have some, who hears it, and that none attends to another.


PACKED = {"data.documents": 3, "kernels.default": None}
THREE = torch.tensor([[3, 6, 1], [7, 3, 0]])


def test_a_module_without_a_causal_mask_sees_later_positions() -> None:
    weights = drawn(16, 8)
    outputs = []
    for causal in (True, False):
        module = Attention(4, 2, 1, 4, bias=False, qk_norm=False, theta=None, causal=causal).double()
        module.qkv.weight.data, module.out.weight.data = weights[:, :4].clone(), weights[:4].clone()
        x = drawn(1, 6, 4).requires_grad_()
        module(x, torch.arange(6)[None], torch.zeros(1, dtype=torch.int64))[:, 2].sum().backward()
        assert x.grad is not None
        outputs.append(bool(x.grad[:, 3:].any()))
    assert outputs == [False, True]


def test_documents_number_positions_and_a_query_without_a_key_has_nothing() -> None:
    lengths = torch.tensor([[2, 0, 3, 0], [1, 1, 1, 2]])
    assert numbered(lengths, 5).tolist() == [[0, 0, 2, 2, 2], [0, 1, 2, 3, 3]]
    lengths = (torch.tensor([[2, 2]]), torch.tensor([[0, 3]]))
    q, k, v = drawn(1, 4, 2, 4), drawn(1, 3, 2, 4), drawn(1, 3, 2, 4)
    output, sums = PLAIN_PARTS.forward(q, k, v, scale=1.0, causal=False, lengths=lengths)
    assert not output[:, :2].any()
    assert (sums[:, :, :2] == -torch.inf).all()
    assert sums[:, :, 2:].isfinite().all()


@pytest.mark.parametrize("heads", [(4, 4, 8), (6, 2, 8), (3, 1, 5)])
def test_the_parts_in_plain_torch_are_right_by_autograd(heads: tuple[int, int, int]) -> None:
    """Their formulas in fp64, which others are checked by, against the whole that torch differentiates."""
    h, g, width = heads
    q, k, v, gradient = drawn(2, 10, h, width), drawn(2, 10, g, width), drawn(2, 10, g, width), drawn(2, 10, h, width)
    for causal in (True, False):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        whole = attend(*leaves, scale=0.4, causal=causal, document_lengths=THREE)
        exact = torch.autograd.grad(whole, leaves, gradient)
        named: dict[str, Any] = {"scale": 0.4, "causal": causal, "lengths": (THREE, THREE)}
        output, sums = PLAIN_PARTS.forward(q, k, v, **named)
        torch.testing.assert_close(output, whole.detach())
        for found, right in zip(PLAIN_PARTS.backward(gradient, q, k, v, output, sums, **named), exact, strict=True):
            torch.testing.assert_close(found, right)
    assert parts_fault(PLAIN_PARTS, Setting(h, g, width, torch.float32, "cpu"), packed=True) == ""


def cores(settings: dict[str, object]) -> list[frozenset[str]]:
    model = build_model(tiny_run(settings))
    return [filled.site.needs for filled in model.slots if filled.site.slot == "Attention.core"]


def test_sites_and_units_get_lengths_only_where_the_loader_packs() -> None:
    assert cores({}) == [frozenset()] * 4
    assert cores(PACKED) == [frozenset({"document_lengths"})] * 4
    heard: list[dict[str, Any]] = []
    for settings in ({"kernels.default": None}, PACKED):
        run = tiny_run(settings)
        parts = build(run)
        block = parts.model.module.get_submodule("blocks.0")
        block.register_forward_pre_hook(lambda *given: heard.append(dict(given[2])), with_kwargs=True)
        parts.model.loss(parts.stepper.entries(next(iter(parts.train_loader.take(8))), 1))  # type: ignore[attr-defined]
    assert [list(named) for named in heard] == [[], ["document_lengths"]]


def test_a_model_that_takes_no_lengths_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Model.__init__

    def without(self: Model, module: Any, plan: Any, **named: Any) -> None:
        original(self, module, replace(plan, units=tuple(replace(u, optional=()) for u in plan.units)), **named)

    monkeypatch.setattr(Model, "__init__", without)
    build_model(tiny_run({}))
    with pytest.raises(UsageError) as refused:
        build_model(tiny_run(PACKED))
    assert "micro batches of data/mock have 'document_lengths', which no unit of models/gpt takes" in str(refused.value)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([[4, 4], [8, 0]], ""),
        ([[4, 3], [8, 0]], "sums to 7 in a sample of 8 tokens"),
        ([[9, -1], [8, 0]], "holds -1"),
        ([[8, 0]], "must be [B, M] of int64"),
    ],
)
def test_lengths_that_are_not_those_of_the_sample_are_malformed(lengths: list[list[int]], said: str) -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    batch = {"tokens": tokens, "labels": tokens, "positions": torch.arange(8)[None], "sample_ids": torch.arange(2)}
    found = malformed({**batch, "document_lengths": torch.tensor(lengths)}, 8)
    assert said in found
    assert bool(found) == bool(said)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (2, 7), (1, 3)])
def test_a_relative_bias_and_its_gradient_are_those_of_every_pair(queries: int, keys: int) -> None:
    table = drawn(3, 2 * R + 1).requires_grad_()
    spec, inputs = replace(SPEC, bias="relative"), AttentionInputs(bias_table=table, num_heads=3)
    found = bias_of(spec, inputs, 3, queries, keys, table.device)
    assert found is not None
    factors, of_table = drawn(3, queries, keys), torch.zeros_like(table)
    for query in range(queries):
        for key in range(keys):
            place = min(max(key - (keys - queries + query), -R), R) + R
            assert torch.equal(found[:, query, key], table[:, place])
            of_table[:, place] += factors[:, query, key]
    (gradient,) = torch.autograd.grad((found * factors).sum(), table)
    torch.testing.assert_close(gradient, of_table, rtol=0, atol=1e-12)


def test_the_gradient_of_a_table_in_bf16_is_summed_in_fp32() -> None:
    """2,016 pairs of the greatest distances: in bf16, ones would add up to 256."""
    table = torch.zeros(1, 3, dtype=torch.bfloat16, requires_grad=True)
    inputs = AttentionInputs(bias_table=table, num_heads=1)
    found = bias_of(replace(SPEC, bias="relative"), inputs, 1, 64, 64, table.device)
    assert found is not None
    (gradient,) = torch.autograd.grad(found.to(torch.bfloat16).sum(), table)
    assert gradient.tolist() == [[2016.0, 64.0, 2016.0]]
