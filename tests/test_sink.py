"""The format in which gradients are kept, and the memory that libraries write them to."""

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest
import torch

from mplug.model.build import build_model as model_of
from mplug.model.build import gradient_dtype, measure_bytes
from mplug.training.assembly import build
from mplug_nn import aligned
from mplug_testing.harness import tiny_run, train_steps

ONE_BATCH = {"optimizer.name": "orthon", "trainer.precision": "bf16", "trainer.micro_batch_size": None}


@pytest.fixture
def takes_bf16(plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant("nova-orthon", "piece.gradient * scalars.scale", "piece.gradient.float() * scalars.scale")
    monkeypatch.setattr(
        importlib.import_module("nova_orthon.muon").Muon, "low_precision_gradients", True, raising=False
    )


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
        {"trainer.gradients": "fp32"},
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
    rounded, whole = train_steps(ONE_BATCH), train_steps({**ONE_BATCH, "trainer.gradients": "fp32"})
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
