"""SDPA against attention computed with every step written out, in fp64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mplug_sdpa import SDPA
from torch import Tensor

from mplug import Offer, Site

B, S, K = 2, 7, 8


def offered() -> Offer:
    (offer,) = SDPA(SDPA.Config()).offer()
    return offer


def core(*inputs: Tensor, **named: Any) -> Tensor:
    result: Tensor = offered().suppliers["Attention.core"](*inputs, **named)
    return result


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale q kᵀ) v for each head and each query's own past."""
    shared = q.shape[2] // k.shape[2]
    heads = []
    for h in range(q.shape[2]):
        scores = scale * q[:, :, h] @ k[:, :, h // shared].transpose(1, 2)
        past = torch.arange(S)[:, None] >= torch.arange(S)
        powers = torch.exp(scores - scores.amax(-1, keepdim=True)) * past
        heads.append(powers / powers.sum(-1, keepdim=True) @ v[:, :, h // shared])
    return torch.stack(heads, dim=2)


def inputs(heads: int, groups: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads + groups)
    shapes = [(B, S, heads, K), (B, S, groups, K), (B, S, groups, K), (B, S, heads, K)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("scale", [K**-0.5, 0.9])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_values_and_gradients_are_those_of_attention_written_out(
    heads: int, groups: int, scale: float, dtype: torch.dtype, tolerance: float
) -> None:
    *given, grad = inputs(heads, groups, dtype)
    ours = [x.clone().requires_grad_() for x in given]
    exact = [x.double().requires_grad_() for x in given]
    y, expected = core(*ours, scale=scale), attend(*exact, scale=scale)
    assert y.dtype is dtype
    assert y.shape == (B, S, heads, K)
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    y.backward(grad)
    expected.backward(grad.double())
    for mine, right in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), right.grad, rtol=10 * tolerance, atol=10 * tolerance)


def test_half_precision_stays_half_and_is_as_near_as_half_precision_is() -> None:
    *given, _ = inputs(4, 2, torch.bfloat16)
    y = core(*given, scale=K**-0.5)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.double(), attend(*(x.double() for x in given), scale=K**-0.5), rtol=0.02, atol=0.02)


def test_it_supplies_the_attention_core_and_nothing_else() -> None:
    assert set(offered().suppliers) == {"Attention.core"}


def site(dropout: float = 0.0, needs: tuple[str, ...] = ()) -> Site:
    return Site("blocks.*.attn", "Attention.core", SimpleNamespace(dropout=dropout), "blocks.0.attn", frozenset(needs))


def test_it_supports_any_site_that_needs_no_more_than_the_values() -> None:
    assert offered().supports(site(), None) is True  # type: ignore[arg-type]


def test_it_says_which_needs_it_does_not_meet() -> None:
    answer = offered().supports(site(needs=("varlen", "log_sum_exp")), None)  # type: ignore[arg-type]
    assert isinstance(answer, str)
    assert "log_sum_exp" in answer
    assert "varlen" in answer


def test_it_speaks_up_on_dropout_because_its_mask_depends_on_the_layout() -> None:
    assert offered().varies(site(), None) == ""  # type: ignore[arg-type]
    assert "dropout" in offered().varies(site(dropout=0.1), None)  # type: ignore[arg-type]


def test_it_drops_attention_weights_with_the_probability_that_is_asked_and_scales_the_rest_up() -> None:
    n, p = 3000, 0.25
    torch.manual_seed(0)
    zeros = torch.zeros(n, 2, 1, K)
    v = torch.eye(2, K)[None, :, None].expand(n, 2, 1, K).contiguous()  # a weight is a coordinate of the result
    weights = core(zeros, zeros, v, scale=1.0, dropout=p)[:, 1, 0, :2]
    assert weights.unique().tolist() == pytest.approx([0.0, 0.5 / (1 - p)])
    share = float((weights > 0).double().mean())
    assert share == pytest.approx(1 - p, abs=5 * (p * (1 - p) / weights.numel()) ** 0.5)
