"""The norm of a rank's gradients: every element once, and in as few stretches as they lie in."""

import pytest
import torch
from torch import Tensor

from mplug.gradients import norm
from mplug.gradients.norm import GlobalNorm, merged

SHAPES = [(3, 4), (5,), (2, 2, 2), (), (7,)]


def arena() -> tuple[Tensor, list[Tensor]]:
    """A tensor, and views of all of its elements in the order in which they lie."""
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    whole = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0))
    return whole, [part.view(shape) for part, shape in zip(whole.split(sizes), SHAPES, strict=True)]


def exact(views: list[Tensor]) -> float:
    return float(sum(float(view.double().square().sum()) for view in views)) ** 0.5


def test_views_that_lie_end_to_end_become_one_whatever_their_order_and_nothing_else_does() -> None:
    whole, views = arena()
    for order in (views, views[::-1], views[2:] + views[:2]):
        (stretch,) = merged(order)
        assert torch.equal(stretch, whole)
        assert stretch.data_ptr() == whole.data_ptr()
    first, second = merged([view for view in views if view.dim() != 3])
    assert torch.equal(first, torch.cat([view.flatten() for view in views[:2]])), "a gap ends a stretch"
    assert torch.equal(second, torch.cat([view.flatten() for view in views[3:]]))
    whole = torch.arange(24.0).view(6, 4)
    columns, below, elsewhere = whole[:3, :2], whole[3:], torch.ones(4)
    found = merged([below, elsewhere, columns])
    assert sorted(tuple(view.shape) for view in found) == [(3, 2), (3, 4), (4,)]
    assert sum(float(view.sum()) for view in found) == float(columns.sum() + below.sum() + 4)
    flat = torch.ones(8)
    assert sum(view.numel() for view in merged([flat[:4], flat[2:6], flat[4:]])) == 12, "they overlap"


def test_the_halves_of_stacked_matrices_become_one_stretch() -> None:
    whole = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(0))
    (stretch,) = merged([whole[:, :4], whole[:, 4:]])
    assert torch.equal(stretch, whole.flatten())
    lone, _, _ = merged([whole[:, :4]])
    assert torch.equal(lone, whole[0, :4])
    assert [view.shape for view in merged([whole[..., :2]])] == [(3, 8, 2)], "their slices are not contiguous either"


@pytest.mark.parametrize("device", ["cpu", "cuda"])  # where they say that they are: the tensors are here
@pytest.mark.parametrize(("long", "longest"), [(1, 1 << 30), (6, 20), (1 << 20, 1 << 30)])
def test_the_norm_is_that_of_all_elements(
    device: str, long: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm, "LONG", long)
    monkeypatch.setattr(norm, "LONGEST", longest)
    _, views = arena()
    owned = [*views[:2], *views[3:], torch.randn(4, 6).T]
    measure = GlobalNorm(owned, device)
    assert float(measure()) == pytest.approx(exact(owned), rel=1e-6)
    views[0].mul_(100)
    assert float(measure()) == pytest.approx(exact(owned), rel=1e-6)
    assert all(part.numel() * part.itemsize <= longest for part in measure.long if part.is_contiguous())


def test_gradients_that_are_not_finite_show_in_the_norm_and_none_have_a_norm_of_zero() -> None:
    for value in (float("inf"), float("nan")):
        whole, views = arena()
        whole[5] = value
        assert not bool(GlobalNorm(views, "cuda")().isfinite())
    assert float(GlobalNorm([], "cpu")()) == 0.0


def test_on_a_cpu_a_large_gradient_is_measured_in_parts_because_a_long_sum_is_rounded_too_often() -> None:
    whole = torch.randn(1 << 22, 4, generator=torch.Generator().manual_seed(0))
    for large in (whole, whole[:, :3]):
        assert float(GlobalNorm([large], "cpu")()) == pytest.approx(exact([large]), rel=1e-6)
    assert float(torch.linalg.vector_norm(whole)) != pytest.approx(exact([whole]), rel=1e-5)
