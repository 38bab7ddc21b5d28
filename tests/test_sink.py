"""The formats of gradients: of operands, of the sinks that they are added to, and of the memory of libraries."""

import importlib
from collections.abc import Callable, Mapping
from itertools import product
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from mplug.model.build import build_model as model_of
from mplug.model.build import gradient_dtype
from mplug.tensors import sink as sink_module
from mplug.training.assembly import build
from mplug_estimates import measure_bytes
from mplug_nn import add_product, add_rows, aligned
from mplug_nn.grouped import add_grouped_product
from mplug_testing.harness import tiny_run, train_steps

ONE_BATCH = {"optimizer.name": "orthon", "trainer.precision": "bf16", "trainer.micro_batch_size": None}


@pytest.fixture
def takes_bf16(plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant("nova-orthon", "piece.gradient * scalars.scale", "piece.gradient.float() * scalars.scale")
    monkeypatch.setattr(importlib.import_module("nova_orthon.muon").Muon, "low_precision_gradients", True)


def format_of(changes: Mapping[str, object] = MappingProxyType({})) -> torch.dtype:
    run = tiny_run({**ONE_BATCH, **changes})
    parts = build(run)
    (dtype,) = {piece.gradient.dtype for piece in parts.pieces}
    held = measure_bytes(run, model_of(run))["gradients"]
    assert held == sum(p.numel() for p in parts.model.parameters().values()) * dtype.itemsize
    return dtype


@pytest.mark.usefixtures("takes_bf16")
def test_a_gradient_that_nothing_is_added_to_has_the_weights_format() -> None:
    assert format_of() is torch.bfloat16


@pytest.mark.usefixtures("takes_bf16")
@pytest.mark.parametrize(
    "changes",
    [
        {"trainer.micro_batch_size": 1},
        {"trainer.gradients": "masters"},
        {"model.tie_embeddings": True},
        {"schedule.batch_rampup.start": 4, "schedule.batch_rampup.increment": 4, "trainer.micro_batch_size": 4},
    ],
    ids=["micro batches", "asked for", "tied", "ramp-up"],
)
def test_gradients_that_are_added_to_are_in_fp32(changes: dict[str, object]) -> None:
    assert format_of(changes) is torch.float32
    run = tiny_run({**ONE_BATCH, "parallel.layout": "dp2"})
    assert gradient_dtype(run, model_of(run)) is torch.float32, "replicas are summed"


def test_an_optimizer_that_does_not_say_so_gets_fp32(plant: Callable[..., None]) -> None:
    plant("nova-orthon")
    assert format_of() is torch.float32


@pytest.mark.usefixtures("takes_bf16")
def test_a_run_with_rounded_gradients_stays_beside_the_one_with_whole_ones() -> None:
    rounded, whole = train_steps(ONE_BATCH), train_steps({**ONE_BATCH, "trainer.gradients": "masters"})
    assert rounded.losses != whole.losses
    assert rounded.losses == pytest.approx(whole.losses, rel=1e-3)
    assert rounded.norms == pytest.approx(whole.norms, rel=1e-2)


def test_what_a_library_writes_to_is_contiguous_and_begins_at_a_multiple_of_16_bytes() -> None:
    arena = torch.arange(64, dtype=torch.bfloat16)
    for sink in (arena[8:32].view(4, 6), arena[4:28].view(4, 6), arena[8:32].view(6, 4).t()):
        suits = sink.is_contiguous() and sink.storage_offset() % 8 == 0
        found = aligned(sink)
        assert (found is sink) == suits
        assert torch.equal(found, sink)
        assert found.is_contiguous()
        assert found.data_ptr() % 16 == 0


# Products and rows that are added to a sink, for every dtype of the operands and of the total; on a GPU too.


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PAIRS = [pytest.param(*pair, id=f"{str(pair[0])[6:]}-into-{str(pair[1])[6:]}") for pair in product(DTYPES, DTYPES)]
MIXED = [pytest.param((torch.float32, torch.bfloat16), total, id=f"two-into-{str(total)[6:]}") for total in DTYPES]
GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
O_, N, I_ = 16, 3, 8
"""Sums of three terms: a product of operands that were rounded before is visibly wrong."""

pairs = pytest.mark.parametrize(("operands", "total"), PAIRS)
devices = pytest.mark.parametrize("device", DEVICES)


def drawn(device: str, dtype: torch.dtype, *shape: int, seed: int) -> Tensor:
    """Values between 0.5 and 1.5, so that no sum cancels: relative errors of elements can be compared."""
    values = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.5
    return values.to(device, dtype)


def errors(found: Tensor, expected: Tensor) -> Tensor:
    """Relative errors of elements, in units of the last place of what was found."""
    return ((found.double() - expected) / expected).abs() / torch.finfo(found.dtype).eps


def bound(operands: torch.dtype, total: torch.dtype) -> float:
    """Rounded once: half a unit; in the total's own dtype, each of the three sums may be rounded."""
    is_narrower = torch.promote_types(operands, total) != total
    return 0.505 if is_narrower else 2.0


@devices
@pytest.mark.parametrize(("operands", "total"), [*PAIRS, *MIXED])
def test_a_product_of_any_dtype_is_added_to_a_total_of_any_dtype(
    operands: Any, total: torch.dtype, device: str
) -> None:
    """Operands of two dtypes multiply in the wider one."""
    first, second = operands if isinstance(operands, tuple) else (operands, operands)
    a, b = drawn(device, first, N, O_, seed=1).t(), drawn(device, second, N, I_, seed=2)
    exact = a.double() @ b.double()
    sink, stale = torch.full((O_, I_), torch.nan, dtype=total, device=device), torch.tensor(True)
    most = bound(first, total) if first == second or total != torch.float64 else 1e-6
    before = torch.zeros_like(exact)
    for _ in range(2):
        add_product(sink, stale, a, b)
        assert not stale
        assert float(errors(sink, before + exact).max()) < most
        before = sink.double().clone()


@devices
@pytest.mark.parametrize("counts", [[10, 0, 6], [0, 0, 0], [1, 3, 2]], ids=str)
@pairs
def test_products_of_groups_of_any_dtype_are_added_to_totals_of_any_dtype(
    operands: torch.dtype, total: torch.dtype, counts: list[int], device: str
) -> None:
    """On a GPU, torch's kernel for bf16 may round the products of one call to bf16 before it adds them."""
    ends = torch.tensor(counts).cumsum(0).to(device, torch.int32)
    a, b = drawn(device, operands, 16, O_, seed=1), drawn(device, operands, 16, I_, seed=2)
    exact = torch.zeros(len(counts), O_, I_, dtype=torch.float64, device=device)
    for group, stop in enumerate(ends.tolist()):
        rows = slice(stop - counts[group], stop)
        exact[group] = a[rows].double().t() @ b[rows].double()
    sink, stale = torch.full(exact.shape, torch.nan, dtype=total, device=device), torch.tensor(True)
    coarse = torch.finfo(torch.bfloat16 if device == "cuda" and operands is torch.bfloat16 else total).eps
    narrow = max(coarse, torch.finfo(total).eps)
    for number in (1, 2):
        add_grouped_product(sink, stale, a, b, ends)
        assert not stale
        torch.testing.assert_close(sink.double(), number * exact, rtol=4 * number * narrow, atol=0)


@devices
@pairs
def test_rows_of_any_dtype_are_added_to_a_table_of_any_dtype(
    operands: torch.dtype, total: torch.dtype, device: str
) -> None:
    rows, indices = drawn(device, operands, 6, I_, seed=1), torch.tensor([2, 2, 6, 0, 2, 6], device=device)
    exact = torch.zeros(7, I_, dtype=torch.float64, device=device).index_add_(0, indices, rows.double())
    sink, stale = torch.full((7, I_), 9.0, dtype=total, device=device), torch.tensor(True)
    for number in (1, 2):
        add_rows(sink, stale, indices, rows)
        coarse = torch.finfo(total).eps
        torch.testing.assert_close(sink.double(), number * exact, rtol=3 * number * coarse, atol=0)


@pytest.mark.parametrize("indices", [[2, 2, 6, 0, 2, 6], [4], [0] * 20], ids=len)
def test_rows_of_one_index_are_one_sum_before_they_are_added_in_any_order(indices: list[int]) -> None:
    index, rows = torch.tensor(indices), torch.randn(len(indices), 3)
    once, sums = sink_module._unique(index, rows, 7, torch.float32)
    added, exact = (torch.zeros(7, 3, dtype=torch.float64) for _ in range(2))
    added.index_add_(0, once, sums.double())
    torch.testing.assert_close(added, exact.index_add_(0, index, rows.double()), rtol=1e-6, atol=1e-6)
    assert len(once) == len(indices)
    assert int(sums.any(dim=1).sum()) == len(set(indices))
