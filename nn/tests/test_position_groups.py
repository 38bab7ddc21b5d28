"""Attention whose queries see the later keys of their own group: in a module, in a block, and with a cache."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from mplug_nn import Attention, CacheSize, DenseBlock, Norm
from mplug_nn.mlp import MLP

GROUPS = torch.tensor([[-1, 0, 0, 0, 0, -1, 1, 1, -1, -1], [0, 0, -1, -1, 1, 1, 1, -1, 2, -1]])
B, S = GROUPS.shape
KEYS = torch.zeros(B, dtype=torch.int64)


def attention(**fields: Any) -> Attention:
    found = Attention(12, 4, 2, 6, bias=False, qk_norm=False, theta=100.0, **fields).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return found


def rows(start: int = 0, end: int = S) -> tuple[Tensor, Tensor]:
    """Inputs [B, end - start, D] and their positions."""
    x = torch.randn(B, S, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return x[:, start:end], torch.arange(start, end)[None]


@pytest.mark.parametrize("window", [None, 2])
def test_a_position_depends_on_the_later_positions_of_its_group_alone(window: int | None) -> None:
    module = attention(position_groups=True, window=window)
    x, positions = rows()
    x = x.clone().requires_grad_()
    y = module(x, positions, KEYS, position_groups=GROUPS)
    for row in range(B):
        for query in range(S):
            (grad,) = torch.autograd.grad(y[row, query].sum(), x, retain_graph=True)
            seen = {key for key in range(S) if grad[row, key].any()}
            group = int(GROUPS[row, query])
            later = {key for key in range(query + 1, S) if group >= 0 and int(GROUPS[row, key]) == group}
            earlier = set(range(0 if window is None else max(0, query - window + 1), query + 1))
            assert seen == earlier | later


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("borders", [(0, 10), (0, 5, 8, 10), (0, 7, 8, 9, 10)])
def test_a_cache_gives_the_same_rows_if_no_call_divides_a_group(window: int | None, borders: tuple[int, ...]) -> None:
    module = attention(position_groups=True, window=window)
    groups = GROUPS[:1].expand(B, S)
    groups = torch.where(torch.arange(S) == 6, -1, groups)
    expected = module(*rows(), KEYS, position_groups=groups)
    module.serve_cache()
    module.cache = module.new_cache(CacheSize(S))
    parts = [module(*rows(start, end), KEYS, position_groups=groups[:, start:end]) for start, end in pairwise(borders)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=1e-12)


def test_a_block_hands_groups_to_its_attention() -> None:
    def block(attn: Attention) -> DenseBlock:
        norm1, norm2 = Norm(12, "rmsnorm"), Norm(12, "rmsnorm")
        torch.nn.init.ones_(norm1.weight)
        torch.nn.init.ones_(norm2.weight)
        mlp = MLP(12, 8, "swiglu", bias=False)
        for parameter in mlp.parameters():
            torch.nn.init.zeros_(parameter)
        return DenseBlock(norm1.double(), attn, norm2.double(), mlp.double())

    attn = attention(position_groups=True)
    x, positions = rows()
    found = block(attn)(x, positions, KEYS, position_groups=GROUPS)
    normed = torch.nn.functional.rms_norm(x, (12,), eps=1e-5)
    torch.testing.assert_close(found, x + attn(normed, positions, KEYS, position_groups=GROUPS))
    assert not torch.allclose(found, block(attn)(x, positions, KEYS))


def test_attention_without_the_need_refuses_groups() -> None:
    with pytest.raises(ValueError, match="without the need 'position groups'"):
        attention()(*rows(), KEYS, position_groups=GROUPS)
