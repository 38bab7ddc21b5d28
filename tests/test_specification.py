"""Attention as a specification: what it computes, and what a site needs.

B batch, S queries, T keys, H query heads, G KV heads, K head dim.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from random_values import drawn
from torch import Tensor, nn

from mplug.model.slots.fill import sites
from mplug_nn import Attention, AttentionInputs, AttentionSpec, scaled_dot_product

H, G, K, V, R = 4, 2, 6, 10, 2
SPEC = AttentionSpec(0.7, K, K)
SPECS = {
    "plain": SPEC,
    "full": replace(SPEC, causal=False),
    "window": replace(SPEC, window=3),
    "window of all": replace(SPEC, causal=False, window=2),
    "documents": replace(SPEC, documents=True, window=4),
    "cap": replace(SPEC, soft_cap=1.5),
    "sinks": replace(SPEC, sinks=True),
    "alibi": replace(SPEC, bias="alibi"),
    "alibi of all": replace(SPEC, bias="alibi", causal=False),
    "relative": replace(SPEC, bias="relative", soft_cap=3.0),
    "values": replace(SPEC, value_width=V),
    "keys": replace(SPEC, own_key_length=True, window=5, bias="alibi"),
    "keys of all": replace(SPEC, own_key_length=True, causal=False, bias="relative"),
}
LENGTHS = [[3, 5, 0], [1, 1, 6]]


def one_by_one(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    """The definition, a query at a time, in Python."""
    b, s, h, _ = q.shape
    output, ahead = torch.zeros(b, s, h, spec.value_width, dtype=q.dtype), k.shape[1] - s
    for row in range(b):
        ends = torch.tensor(LENGTHS[row]).cumsum(0).tolist()
        document = [sum(position >= end for end in ends) for position in range(k.shape[1])]
        for query in range(s):
            at = query + ahead
            seen = [
                key
                for key in range(k.shape[1])
                if (key <= at or not spec.causal)
                and (spec.window is None or abs(key - at) < spec.window)
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


def test_slopes_of_heads_that_are_no_power_of_two() -> None:
    """Six heads: those of four, 4^-n, and two of eight's: 2^-1 and 2^-3 (the paper's own rule)."""
    from mplug_nn.specification import alibi_slopes

    slopes = [4.0**-1, 4.0**-2, 4.0**-3, 4.0**-4, 2.0**-1, 2.0**-3]
    assert alibi_slopes(torch.arange(6), 6).tolist() == slopes


def test_a_bias_that_plain_torch_does_not_know_is_no_bias() -> None:
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
    ],
)
def test_whatever_is_not_plain_is_a_need(changes: dict[str, Any], needs: set[str]) -> None:
    assert replace(SPEC, **changes).needs == needs


def test_a_module_that_states_a_specification_need_not_repeat_it_as_needs() -> None:
    class Forgetful(Attention):
        def needs(self, slot: str, entries: Any) -> frozenset[str]:
            return frozenset()

    with torch.device("meta"):
        module = nn.Sequential(Forgetful(8, 2, 2, 4, bias=False, qk_norm=False, theta=None, window=4))
    found = {site.slot: site.needs for site in sites(module, ("document_lengths",))}
    assert found["Attention.core"] == {"window", "document_lengths"}
    assert found["Attention.prepare_qk"] == frozenset()
