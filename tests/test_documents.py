"""Samples that are packed with documents: who says so, who hears it, and that no document attends to another."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from plain_attention import attend
from random_values import drawn

from mplug import UsageError
from mplug.model.build import build_model
from mplug.model.model import Model
from mplug.training.assembly import build
from mplug_nn import Attention
from mplug_nn.attention import needs_of_specification
from mplug_nn.parts import PLAIN_PARTS, numbered
from mplug_testing.capabilities import Setting, parts_fault
from mplug_testing.harness import tiny_run
from mplug_testing.samples import malformed

PACKED = {"data.documents": 3, "kernels.default": None}
LENGTHS = torch.tensor([[3, 6, 1], [7, 3, 0]])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_each_document_attends_as_it_does_alone(causal: bool, kv_heads: int) -> None:
    q, k, v = drawn(2, 10, 4, 6), drawn(2, 10, kv_heads, 6), drawn(2, 10, kv_heads, 6) + 1
    whole = attend(q, k, v, scale=0.4, causal=causal, document_lengths=LENGTHS)
    for row, lengths in enumerate(LENGTHS.tolist()):
        for part in torch.arange(10).split(lengths):
            alone = attend(*(x[row : row + 1, part] for x in (q, k, v)), scale=0.4, causal=causal)
            torch.testing.assert_close(whole[row : row + 1, part], alone)


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


def test_positions_are_numbered_by_their_documents() -> None:
    lengths = torch.tensor([[2, 0, 3, 0], [1, 1, 1, 2]])
    assert numbered(lengths, 5).tolist() == [[0, 0, 2, 2, 2], [0, 1, 2, 3, 3]]


@pytest.mark.parametrize("heads", [(4, 4, 8), (6, 2, 8), (3, 1, 5)])
def test_the_parts_in_plain_torch_are_right_by_autograd(heads: tuple[int, int, int]) -> None:
    """Their formulas in fp64, which others are checked by, against the whole that torch differentiates."""
    h, g, width = heads
    q, k, v, gradient = drawn(2, 10, h, width), drawn(2, 10, g, width), drawn(2, 10, g, width), drawn(2, 10, h, width)
    for causal in (True, False):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        whole = attend(*leaves, scale=0.4, causal=causal, document_lengths=LENGTHS)
        exact = torch.autograd.grad(whole, leaves, gradient)
        named: dict[str, Any] = {"scale": 0.4, "causal": causal, "lengths": (LENGTHS, LENGTHS)}
        output, sums = PLAIN_PARTS.forward(q, k, v, **named)
        torch.testing.assert_close(output, whole.detach())
        for found, right in zip(PLAIN_PARTS.backward(gradient, q, k, v, output, sums, **named), exact, strict=True):
            torch.testing.assert_close(found, right)
    assert parts_fault(PLAIN_PARTS, Setting(h, g, width, torch.float32, "cpu"), packed=True) == ""


def test_a_query_without_a_key_has_nothing_and_says_so() -> None:
    lengths = (torch.tensor([[2, 2]]), torch.tensor([[0, 3]]))
    q, k, v = drawn(1, 4, 2, 4), drawn(1, 3, 2, 4), drawn(1, 3, 2, 4)
    output, sums = PLAIN_PARTS.forward(q, k, v, scale=1.0, causal=False, lengths=lengths)
    assert not output[:, :2].any()
    assert (sums[:, :, :2] == -torch.inf).all()
    assert sums[:, :, 2:].isfinite().all()


# Who says it, who hears it.


def cores(settings: dict[str, object]) -> list[frozenset[str]]:
    model = build_model(tiny_run(settings))
    return [filled.site.needs for filled in model.slots if filled.site.slot == "Attention.core"]


def test_sites_need_lengths_only_where_the_loader_packs() -> None:
    assert cores({}) == [frozenset()] * 4
    assert cores(PACKED) == [frozenset({"document_lengths"})] * 4


def test_units_get_lengths_only_where_there_are_some() -> None:
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


def test_a_module_needs_what_its_specification_says_and_what_micro_batches_have() -> None:
    with torch.device("meta"):
        module = Attention(8, 2, 2, 4, bias=False, qk_norm=False, theta=None, causal=False)
    assert needs_of_specification(module, ("document_lengths",)) == {"document_lengths", "full attention"}
    assert module.needs("Attention.prepare_qk", ("document_lengths",)) == frozenset()


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
