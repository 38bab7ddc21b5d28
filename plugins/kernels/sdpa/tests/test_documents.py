"""Attention with a relative bias computes a document at a time, if the call names the rows of documents."""

import pytest
import torch
from mplug_sdpa.attention import CORES
from torch.utils.flop_counter import FlopCounterMode

from mplug_nn import AttentionInputs, AttentionSpec, scaled_dot_product

LONGEST, HEADS, WIDTH, REACH = 6, 2, 8, 3
LENGTHS = [4, 2, 6, 1, 5, 3]
"""Of three documents and of padding, which is documents 1, 3 and 5; the second document has no padding of its own."""
SPEC = AttentionSpec(1.0, WIDTH, WIDTH, causal=False, bias="relative", documents=True)


def rows() -> torch.Tensor:
    """The rows of the three documents."""
    starts = [sum(LENGTHS[:number]) for number in range(len(LENGTHS))]
    lines = torch.full((3, LONGEST), -1)
    for line, number in zip(lines, (0, 2, 4), strict=True):
        line[: LENGTHS[number]] = torch.arange(starts[number], starts[number] + LENGTHS[number])
    return lines


@pytest.mark.parametrize("backend", ["torch", "math"])
def test_documents_apart_are_what_plain_torch_computes_of_all_rows(backend: str) -> None:
    torch.manual_seed(3)
    shape = (1, sum(LENGTHS), HEADS, WIDTH)
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    table = torch.randn(HEADS, 2 * REACH + 1, dtype=torch.float64, requires_grad=True)
    whole = AttentionInputs(document_lengths=torch.tensor([LENGTHS]), bias_table=table, num_heads=HEADS)
    read = rows()[rows() >= 0]
    factors = torch.randn(len(read), HEADS, WIDTH, dtype=torch.float64)
    found = []
    for core, inputs in ((CORES[backend], whole._replace(document_rows=rows())), (scaled_dot_product, whole)):
        mixed = core(*given, SPEC, inputs)[0, read]
        found.append((mixed, *torch.autograd.grad((mixed * factors).sum(), (*given, table))))
    for own, right in zip(*found, strict=True):
        torch.testing.assert_close(own, right, rtol=0, atol=1e-12)


def test_the_products_are_those_of_pairs_within_documents() -> None:
    shape = (1, sum(LENGTHS), HEADS, WIDTH)
    q, k, v = (torch.randn(shape) for _ in range(3))
    inputs = AttentionInputs(bias_table=torch.randn(HEADS, 2 * REACH + 1), num_heads=HEADS, document_rows=rows())
    with FlopCounterMode(display=False) as counter:
        CORES["math"](q, k, v, SPEC, inputs._replace(document_lengths=torch.tensor([LENGTHS])))
    assert counter.get_total_flops() == 4 * HEADS * WIDTH * len(rows()) * LONGEST**2
