"""Attention with windows, documents, soft caps and attention sinks: the plain composition in fp64, and what it visits.

B batch, S queries, T keys, H query heads, G KV heads, K head dim.
"""

from functools import partial
from typing import Any

import pytest
import torch
from mplug_triton.sight import Mask, ranges_of, sight_of
from torch import Tensor
from triton_kernels import CANNOT_RUN, DEVICE, INTERPRETED, repair_the_interpreter, runs, torchs_rounding  # noqa: F401

from mplug_nn import AttentionInputs, AttentionSpec
from mplug_nn.attention import scaled_dot_product
from mplug_nn.parts import Places
from mplug_nn.specification import unseen, unseen_by_position

if not CANNOT_RUN:
    from mplug_triton import attention_launch
    from mplug_triton.attention import attention

if INTERPRETED and not CANNOT_RUN:
    repair_the_interpreter()

LENGTHS = ((7, 1, 62, 0), (70, 0, 0, 0))
ALL: dict[str, Any] = {"window": 20, "documents": True, "soft_cap": 2.0, "sinks": True}
SPECS: list[dict[str, Any]] = [ALL, {**ALL, "causal": False}, {"window": 40}]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 and 32, so that a short sequence has some that are empty, full and partial."""
    wide, long = (attention_launch.Tiles(*tile, 4, 1) for tile in ((16, 32), (32, 16)))
    plan = attention_launch.Plan(wide, wide, long)
    monkeypatch.setattr(attention_launch, "plan_of", lambda _: plan)


def outcome(
    core: Any, spec: AttentionSpec, dtype: torch.dtype, size: tuple[int, ...], wide: torch.dtype
) -> list[Tensor]:
    """The output and the gradients of q, k, v and sinks, from inputs that are rounded to `dtype`."""
    b, s, t, h, g = size
    generator = torch.Generator().manual_seed(0)
    shapes = [(b, s, h, spec.key_width), *[(b, t, g, spec.key_width)] * 2, (h,), (b, s, h, spec.key_width)]
    drawn = [torch.randn(shape, generator=generator).to(DEVICE, dtype).to(wide) for shape in shapes]
    *leaves, gradient = drawn
    leaves = [x.requires_grad_() for x in (leaves if spec.sinks else leaves[:3])]
    lengths = torch.tensor(LENGTHS[:b], device=DEVICE) if spec.documents else None
    given = AttentionInputs(document_lengths=lengths, sinks=leaves[3] if spec.sinks else None)
    output = core(*leaves[:3], spec, given)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


@runs
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("asked", SPECS, ids=str)
def test_output_and_all_gradients_are_those_of_the_composition_in_fp64(asked: dict[str, Any]) -> None:
    spec, size = AttentionSpec(0.3, 16, 16, **asked), (2, 70, 70, 2, 1)
    found = outcome(attention, spec, torch.float32, size, torch.float32)
    for ours, exact in zip(found, outcome(scaled_dot_product, spec, torch.float32, size, torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=2e-6 * float(exact.abs().max().clamp(min=1)))


@runs
@pytest.mark.usefixtures("small_tiles")
def test_widths_that_are_no_power_of_two_and_more_keys_than_queries_in_bf16() -> None:
    spec, size = AttentionSpec(0.3, 24, 24, own_key_length=True, window=30, sinks=True), (1, 20, 60, 4, 2)
    found = outcome(attention, spec, torch.bfloat16, size, torch.bfloat16)
    for ours, exact in zip(found, outcome(scaled_dot_product, spec, torch.bfloat16, size, torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=2e-2 * float(exact.abs().max().clamp(min=1)))


# Which keys a query sees, against masks of all pairs.


def seen_by(mask: Mask, queries: int, keys: int) -> Tensor:
    first, end = sight_of(mask, queries, keys, torch.device("cpu"))
    t = torch.arange(keys)
    return (t >= first[..., None]) & (t < end[..., None])  # [1 or B, S, T]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("needs", [(), ("documents",), ("groups",), ("documents", "groups")], ids=str)
def test_intervals_are_the_keys_that_the_specification_shows(
    causal: bool, window: int | None, needs: tuple[str, ...]
) -> None:
    lengths = torch.tensor(((5, 1, 7, 0), (13, 0, 0, 0))) if "documents" in needs else None
    groups = torch.tensor(((-1, 0, 0, 0, -1, 1, -1, 2, 2, 2, 2, 2, -1), (0, 0, 0, 1, 1, 1, 1, 1, 1, -1, -1, -1, 2)))
    groups = groups if "groups" in needs and causal else None
    spec = AttentionSpec(1.0, 8, 8, causal, window, lengths is not None, groups is not None)
    inputs = AttentionInputs(document_lengths=lengths, position_groups=groups)
    hidden = torch.zeros(2, 13, 13, dtype=torch.bool)
    for mask in unseen(spec, inputs, 13, 13, torch.device("cpu")):
        hidden = hidden | mask.reshape(-1, 13, 13)
    pair = None if lengths is None else (lengths, lengths)
    assert torch.equal(seen_by(Mask(causal, window, pair, groups), 13, 13).expand(2, -1, -1), ~hidden)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 4])
def test_intervals_of_a_part_follow_its_positions(causal: bool, window: int | None) -> None:
    places = Places((range(4, 9), range(20, 24)), (range(2), range(6, 13)), window)
    own, others = (torch.tensor([n for part in parts for n in part]) for parts in places[:2])
    hidden = torch.zeros(9, 9, dtype=torch.bool)
    for mask in unseen_by_position(others - own[:, None], causal, window):
        hidden |= mask
    assert torch.equal(seen_by(Mask(causal, places=places), 9, 9)[0], ~hidden)


@pytest.mark.parametrize("window", [None, 9])
def test_the_ranges_of_queries_of_a_tile_of_keys_are_those_of_all_pairs(window: int | None) -> None:
    lengths = torch.tensor(LENGTHS)
    mask = Mask(True, window, (lengths, lengths))
    seen, tile = seen_by(mask, 70, 70), 16
    found = ranges_of(sight_of(mask, 70, 70, torch.device("cpu")), 70, tile)
    for sample, rows in zip(seen, found.tolist(), strict=True):
        for number, (first, first_full, end_full, end) in enumerate(rows):
            part = sample[:, number * tile : (number + 1) * tile]
            some, full = (
                [query for query, sees in enumerate(part) if bool(getattr(sees, how)())] for how in ("any", "all")
            )
            assert set(some) <= set(range(first, end))
            assert full == list(range(first_full, end_full))


@pytest.mark.parametrize("window", [1024, 4096])
def test_the_tiles_that_backward_visits_are_proportional_to_the_window(window: int) -> None:
    for length in (1 << 15, 1 << 20):
        ranges = ranges_of(sight_of(Mask(True, window), length, length, torch.device("cpu")), length, 128)
        visited = (ranges[..., 3] - ranges[..., 0]).max()
        assert int(visited) == window + 127


def test_lengths_that_change_in_place_give_another_sight() -> None:
    lengths = torch.tensor(((4, 6),))
    mask = Mask(True, None, (lengths, lengths))
    see = partial(sight_of, mask, 10, 10, torch.device("cpu"))
    before = see()
    assert see() is before
    lengths.copy_(torch.tensor(((5, 5),)))
    assert not torch.equal(see().first, before.first)
    assert torch.equal(see().first, sight_of(replace_lengths(mask), 10, 10, torch.device("cpu")).first)


def replace_lengths(mask: Mask) -> Mask:
    """The mask with copies of its lengths."""
    assert mask.lengths is not None
    other = mask.lengths[0].clone()
    return mask._replace(lengths=(other, other))
