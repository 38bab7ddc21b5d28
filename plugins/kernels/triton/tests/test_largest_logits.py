"""The largest attention logits: the function of plain torch in fp64, over tiles that are empty, partial and full.

The suite has small cases of every mask (`mplug_testing.kernel_cases.largest_logits`).
"""

from typing import Any

import pytest
import torch
from mplug_triton.largest_logits import maximum
from torch import Tensor
from triton_kernels import CANNOT_RUN, DEVICE, INTERPRETED, repair_the_interpreter, runs, torchs_rounding  # noqa: F401

from mplug_nn import AttentionInputs, AttentionSpec
from mplug_nn.largest_logits import Intervals, keep_largest_logits

if INTERPRETED and not CANNOT_RUN:
    repair_the_interpreter()

HALF = torch.bfloat16
LENGTHS = ((7, 1, 62, 0), (70, 0, 0, 0))
WHOLE: Intervals = ((0, 70),)
PARTS: Intervals = ((10, 25), (45, 60))
"""Positions of a rank that has two parts of each sequence."""
GROUPS = torch.full((2, 70), -1)
GROUPS[0, 20:50], GROUPS[1, 40:66] = 0, 1
ASKED: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"window": 20},
    {"window": 20, "causal": False},
    {"window": 40, "documents": True},
    {"documents": True, "causal": False},
    {"position_groups": True},
    {"position_groups": True, "documents": True, "window": 20},
]


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def found(function: Any, q: Tensor, k: Tensor, intervals: Intervals, spec: AttentionSpec) -> Tensor:
    """The largest logits, in fp64."""
    largest = torch.full((q.shape[2],), float("-inf"), dtype=torch.float64, device=DEVICE)
    lengths = torch.tensor(LENGTHS, device=DEVICE) if spec.documents else None
    groups = GROUPS.to(DEVICE) if spec.position_groups else None
    function(largest, q, k, intervals, spec, AttentionInputs(document_lengths=lengths, position_groups=groups))
    return largest


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 and 32, so that a short sequence has some that are empty, full and partial."""
    from mplug_triton import largest_logits_launch as launch

    small = launch.Tiles(16, 32, 4, 1)
    monkeypatch.setattr(launch, "HALF", dict.fromkeys(launch.HALF, small))
    monkeypatch.setattr(launch, "SINGLE", small)


def assert_exact(asked: dict[str, Any], intervals: Intervals, dtype: torch.dtype) -> None:
    spec, queries = AttentionSpec(0.3, 16, 16, **asked), sum(end - first for first, end in intervals)
    q, k = drawn(2, queries, 4, 16, dtype=dtype), drawn(2, 70, 2, 16, dtype=dtype, seed=1)
    for negative in (False, True):
        q, k = (-1 - q.abs(), 1 + k.abs()) if negative else (q, k)  # then a key too many has a product of 0
        right = found(keep_largest_logits, q.double(), k.double(), intervals, spec)
        torch.testing.assert_close(found(maximum, q, k, intervals, spec), right, rtol=2e-6, atol=0)


@runs
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("asked", "intervals", "dtype"), [(ASKED[4], WHOLE, torch.float32), (ASKED[-1], PARTS, HALF)])
def test_it_is_the_maximum_of_plain_torch_in_fp64(
    asked: dict[str, Any], intervals: Intervals, dtype: torch.dtype
) -> None:
    assert_exact(asked, intervals, dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("intervals", [WHOLE, PARTS], ids=["all positions", "two parts"])
@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_every_mask_gives_the_maximum_of_plain_torch_in_fp64(
    asked: dict[str, Any], intervals: Intervals, dtype: torch.dtype
) -> None:
    assert_exact(asked, intervals, dtype)


@runs
def test_parts_of_a_sequence_together_have_the_maximum_of_the_whole() -> None:
    spec = AttentionSpec(0.3, 24, 24, window=30, documents=True)
    q, k = drawn(2, 70, 4, 24, dtype=torch.float32), drawn(2, 70, 1, 24, dtype=torch.float32, seed=1)
    parts = [found(maximum, q[:, first:end], k, ((first, end),), spec) for first, end in ((0, 33), (33, 70))]
    assert torch.equal(torch.maximum(*parts), found(maximum, q, k, WHOLE, spec))


@runs
def test_a_recomputation_changes_nothing() -> None:
    spec, q = AttentionSpec(0.3, 16, 16), drawn(2, 70, 2, 16, dtype=torch.float32)
    seen = []
    x = torch.zeros(1, requires_grad=True)
    x.register_hook(lambda _: seen.append(found(maximum, q, q, WHOLE, spec)))  # runs in a backward pass, as they do
    x.sum().backward()
    assert torch.equal(seen[0], torch.full_like(seen[0], float("-inf")))
    assert bool(found(maximum, q, q, WHOLE, spec).isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128, 192, 256])
@pytest.mark.parametrize("asked", [{}, {"window": 1000}, {"causal": False}], ids=str)
def test_its_tiles_give_the_maximum_of_plain_torch(asked: dict[str, Any], width: int) -> None:
    spec = AttentionSpec(0.1, width, width, **asked)
    q, k = drawn(2, 3000, 8, width, dtype=torch.bfloat16), drawn(2, 3000, 2, width, dtype=torch.bfloat16, seed=1)
    right = found(keep_largest_logits, q.double(), k.double(), ((0, 3000),), spec)
    torch.testing.assert_close(found(maximum, q, k, ((0, 3000),), spec), right, rtol=2e-6, atol=0)


@pytest.mark.gpu
def test_it_keeps_no_scores_in_memory() -> None:
    spec, length = AttentionSpec(0.1, 128, 128), 16384
    q, k = (drawn(1, length, 8, 128, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    found(maximum, q, k, ((0, length),), spec)  # compiles
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found(maximum, q, k, ((0, length),), spec)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
