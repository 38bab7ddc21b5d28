"""Embedding and merging of patches, and the join with tokens, beside plain formulas in fp64."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mplug import Inits, describe
from mplug_nn import Attention, Norm, PatchEmbedding, PatchMerger, StreamJoin
from mplug_nn.specification import DOCUMENTS
from mplug_nn.vision.patches import sampled


def filled(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return module


def places_of(rows: int, columns: int) -> Tensor:
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    return torch.cat((grid, torch.tensor([rows, columns]).expand(len(grid), 2)), dim=1)[None]


@pytest.mark.parametrize(("rows", "columns"), [(7, 4), (2, 9), (3, 3), (5, 1)])
def test_learned_positions_are_stretched_as_torch_stretches_pictures(rows: int, columns: int) -> None:
    grid = torch.randn(25, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    picture = grid.T.view(1, 6, 5, 5)
    expected = F.interpolate(picture, (rows, columns), mode="bilinear", align_corners=True)[0].flatten(1).T[None]
    found = sampled(grid, places_of(rows, columns))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    weight = torch.randn_like(found)
    (of_ours,) = torch.autograd.grad((found * weight).sum(), grid, retain_graph=True)
    (of_torch,) = torch.autograd.grad((expected * weight).sum(), grid)
    torch.testing.assert_close(of_ours, of_torch, rtol=0, atol=1e-12)


def test_an_embedding_is_a_product_with_flattened_patches_and_the_positions() -> None:
    embedding = filled(PatchEmbedding(12, 6, bias=True, num_positions=16))
    patches, places = torch.randn(1, 6, 12), places_of(2, 3)
    weight, bias = embedding.project.weight, embedding.project.bias
    expected = F.linear(patches.double(), weight, bias) + sampled(embedding.position, places)
    torch.testing.assert_close(embedding(patches, places), expected, rtol=0, atol=1e-13)
    half = embedding.to(torch.bfloat16)
    assert half(patches, places).dtype == torch.bfloat16


@pytest.mark.parametrize("wide", [False, True], ids=["norm of each patch", "norm of the square"])
def test_a_merger_joins_consecutive_rows(wide: bool) -> None:
    merger = filled(PatchMerger(Norm(24 if wide else 6, "layernorm", bias=True), 6, 4, 10))
    x = torch.randn(1, 8, 6, dtype=torch.float64)
    weight, bias = merger.norm.weight, merger.norm.bias
    joined = x.view(1, 2, 24) if wide else F.layer_norm(x, (6,), weight, bias, 1e-5).view(1, 2, 24)
    joined = F.layer_norm(joined, (24,), weight, bias, 1e-5) if wide else joined
    expected = F.linear(
        F.gelu(F.linear(joined, merger.up.weight, merger.up.bias)), merger.down.weight, merger.down.bias
    )
    torch.testing.assert_close(merger(x), expected, rtol=0, atol=1e-13)


def test_a_merger_counts_a_product_for_every_merged_row() -> None:
    with torch.device("meta"):
        merger = PatchMerger(Norm(6, "rmsnorm"), 6, 4, 10)
    assert describe(merger, Inits.normal(0.02, 0.02)).flops.per_token == 6 * (24 * 24 + 24 * 10) // 4


def test_a_merger_takes_no_gated_activation() -> None:
    with pytest.raises(ValueError, match="a merger has one projection before its activation, and 'swiglu' needs two"):
        PatchMerger(Norm(6, "rmsnorm"), 6, 4, 10, "swiglu")


@pytest.mark.parametrize("add", [False, True], ids=["replace", "add"])
def test_a_join_puts_rows_into_their_places_alone(add: bool) -> None:
    hidden = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(1, 3, 3, dtype=torch.float64, requires_grad=True)
    places = torch.tensor([[-1, 2, 0, -1], [-1, -1, -1, 1]])
    expected = hidden.detach().clone()
    for sample, position, row in ((0, 1, 2), (0, 2, 0), (1, 3, 1)):
        own = rows.detach()[0, row]
        expected[sample, position] = expected[sample, position] + own if add else own
    joined = StreamJoin(add)(hidden, rows, places)
    assert torch.equal(joined, expected)
    weight = torch.randn_like(expected)
    of_hidden, of_rows = torch.autograd.grad((joined * weight).sum(), (hidden, rows))
    assert torch.equal(of_rows[0], torch.stack([weight[0, 2], weight[1, 3], weight[0, 1]]))
    assert torch.equal(of_hidden, weight if add else weight * (places < 0)[..., None])


def test_attention_over_frames_asks_for_documents_whatever_the_loader_supplies() -> None:
    plain = Attention(16, 2, 2, 8, bias=True, qk_norm=False, theta=None, causal=False)
    of_frames = Attention(16, 2, 2, 8, bias=True, qk_norm=False, theta=None, causal=False, documents=True)
    core = Attention.SLOTS[0]
    assert core.needs(plain, ()) == {"full attention"}
    assert core.needs(plain, {DOCUMENTS}) == core.needs(of_frames, ()) == {"full attention", DOCUMENTS}
