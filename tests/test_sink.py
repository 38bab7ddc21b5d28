"""Adding to a gradient sink: rows of a table, and the format in which gradients are kept."""

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mplug.model.build import build_model as model_of
from mplug.model.build import measure_bytes
from mplug.tensors import sink as module
from mplug.training.assembly import build
from mplug_nn import Embedding, add_rows, aligned
from mplug_testing.harness import tiny_run, train_steps

V, D = 7, 3
INDICES = torch.tensor([2, 2, 6, 0, 2, 6])


def exact(indices: Tensor, rows: Tensor, before: Tensor | None = None) -> Tensor:
    total = torch.zeros(V, D, dtype=torch.float64) if before is None else before.double()
    for index, row in zip(indices.tolist(), rows.double(), strict=True):
        total[index] += row
    return total


def fresh(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((V, D), 9.0, dtype=dtype)


def flag(value: bool) -> Tensor:
    return torch.tensor(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_for_one_index_are_summed(dtype: torch.dtype) -> None:
    rows, total, stale = torch.randn(len(INDICES), D).to(dtype), fresh(), flag(True)
    add_rows(total, stale, INDICES, rows)
    torch.testing.assert_close(total.double(), exact(INDICES, rows), rtol=1e-6, atol=1e-6)
    assert not stale
    add_rows(total, stale, INDICES, rows)
    torch.testing.assert_close(total.double(), 2 * exact(INDICES, rows), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("indices", [INDICES, torch.tensor([4]), torch.zeros(20, dtype=torch.int64)])
def test_indices_that_come_once_have_the_sums_of_those_that_come_often(indices: Tensor) -> None:
    rows = torch.randn(len(indices), D)
    once, sums = module._unique(indices, rows, V, torch.float32)
    assert len(once) == len(indices)
    torch.testing.assert_close(exact(once, sums), exact(indices, rows), rtol=1e-6, atol=1e-6)
    assert int(sums.any(dim=1).sum()) == len(indices.unique())


def test_a_lookup_gives_the_table_no_gradient_but_in_its_sink() -> None:
    table = Embedding(V, D)
    torch.nn.init.normal_(table.weight)
    table.weight.main_grad, table.weight.main_grad_stale = fresh(), flag(True)  # type: ignore[attr-defined]
    grad = torch.randn(2, 3, D)
    out = table(INDICES.view(2, 3))
    assert torch.equal(out, table.weight[INDICES].view(2, 3, D))
    out.backward(grad)
    assert table.weight.grad is None
    torch.testing.assert_close(
        table.weight.main_grad.double(),  # type: ignore[attr-defined]
        exact(INDICES, grad.view(-1, D)),
        rtol=1e-6,
        atol=1e-6,
    )


# The format of gradients.

ONE_BATCH = {"optimizer.name": "orthon", "trainer.precision": "bf16", "trainer.micro_batch_size": None}


@pytest.fixture
def takes_bf16(plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant("nova-orthon", "piece.gradient * scalars.scale", "piece.gradient.float() * scalars.scale")
    monkeypatch.setattr(
        importlib.import_module("nova_orthon.muon").Muon, "low_precision_gradients", True, raising=False
    )


def format_of(**changes: object) -> torch.dtype:
    run = tiny_run({**ONE_BATCH, **{name.replace("__", "."): value for name, value in changes.items()}})
    parts = build(run)
    (dtype,) = {piece.gradient.dtype for piece in parts.pieces}
    model = model_of(run)
    held = measure_bytes(run, model)["gradients"]
    assert held == sum(p.numel() for p in parts.model.parameters().values()) * dtype.itemsize
    return dtype


@pytest.mark.usefixtures("takes_bf16")
def test_a_gradient_that_nothing_is_added_to_has_the_weights_format() -> None:
    assert format_of() is torch.bfloat16


@pytest.mark.usefixtures("takes_bf16")
@pytest.mark.parametrize(
    "changes",
    [
        {"trainer__micro_batch_size": 1},
        {"trainer__gradients": "masters"},
        {"model__tie_embeddings": True},
        {"schedule__batch_rampup__start": 4, "schedule__batch_rampup__increment": 4, "trainer__micro_batch_size": 4},
    ],
    ids=["micro batches", "asked for", "tied", "ramp-up"],
)
def test_gradients_that_are_added_to_are_in_fp32(changes: dict[str, object]) -> None:
    assert format_of(**changes) is torch.float32


@pytest.mark.usefixtures("takes_bf16")
def test_gradients_that_are_summed_over_replicas_are_in_fp32() -> None:
    from mplug.model.build import gradient_dtype

    run = tiny_run({**ONE_BATCH, "parallel.layout": "dp2"})
    assert gradient_dtype(run, model_of(run)) is torch.float32


def test_an_optimizer_that_does_not_say_so_gets_fp32(plant: Callable[..., None]) -> None:
    plant("nova-orthon")
    assert format_of() is torch.float32


@pytest.mark.usefixtures("takes_bf16")
def test_a_run_with_rounded_gradients_stays_beside_the_one_with_whole_ones() -> None:
    rounded, whole = train_steps(ONE_BATCH), train_steps({**ONE_BATCH, "trainer.gradients": "masters"})
    assert rounded.losses != whole.losses
    for mine, theirs in zip(rounded.losses, whole.losses, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)
    for mine, theirs in zip(rounded.norms, whole.norms, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-2)


def test_what_a_library_writes_to_is_contiguous_and_begins_at_a_multiple_of_16_bytes() -> None:
    arena = torch.arange(64, dtype=torch.bfloat16)
    for sink in (arena[8:32].view(4, 6), arena[4:28].view(4, 6), arena[8:32].view(6, 4).t()):
        suits = sink.is_contiguous() and sink.storage_offset() % 8 == 0
        found = aligned(sink)
        assert (found is sink) == suits
        assert torch.equal(found, sink)
        assert found.is_contiguous()
        assert found.data_ptr() % 16 == 0
