"""Samples that are divided by documents: who holds what, what is exchanged, and the attention of ranks as that of one.

B batch, S sequence, H query heads, G KV heads, K head dim, R ranks.
"""

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from mplug_cp.blocks import Sight
from mplug_cp.by_documents import by_documents
from mplug_cp.division import CLOSE, divided, pairs_of, work_of
from mplug_cp.document_exchange import exchange_of
from mplug_cp.needs import needs_of
from mplug_cp.operators import Call
from mplug_cp.redistribution import in_zigzag, moves_of
from mplug_cp.wraps import by_parts
from mplug_cp.zigzag import zigzag
from torch import Tensor

from mplug_nn import AttentionInputs, AttentionSpec
from mplug_nn.attention import DOT_PRODUCT, scaled_dot_product
from mplug_testing import run_workers

B, H, K = 2, 4, 6


@st.composite
def packed(draw: st.DrawFn, samples: int = 1) -> tuple[int, list[tuple[int, ...]]]:
    """(ranks, lengths of the documents of samples of one length that 2 R divides; some are zeros at the end)."""
    size = draw(st.integers(1, 6))
    total = 2 * size * draw(st.integers(1, 12))
    found = []
    for _ in range(samples):
        ends = [*sorted(draw(st.sets(st.integers(1, total - 1), max_size=min(40, total - 1)))), total]
        lengths = [stop - start for start, stop in zip([0, *ends], ends, strict=False)]
        found.append((*lengths, *([0] * draw(st.integers(0, 2)))))
    return size, found


EQUAL = st.sampled_from([1, 16, 1000])


@given(packed(), EQUAL)
def test_every_rank_holds_an_equal_share_and_every_position_is_held_once(
    sample: tuple[int, list[tuple[int, ...]]], equal_length: int
) -> None:
    """So nothing is padded, and the linear work of all ranks is equal."""
    size, (lengths,) = sample
    ranges = divided(lengths, size, equal_length)
    assert [sum(map(len, held)) for held in ranges] == [sum(lengths) // size] * size
    assert sorted(at for held in ranges for part in held for at in part) == list(range(sum(lengths)))
    assert all(one.stop <= other.start for held in ranges for one, other in pairwise(held))
    work = sum(work_of(lengths, held, equal_length) for held in ranges)
    assert work == sum(pairs_of(0, one) + one * (equal_length // 2) for one in lengths)


def of_documents(lengths: tuple[int, ...], size: int, equal_length: int) -> list[set[int]]:
    """The ranks that hold a part of each document."""
    number = [n for n, length in enumerate(lengths) for _ in range(length)]
    found: list[set[int]] = [set() for _ in lengths]
    for rank, held in enumerate(divided(lengths, size, equal_length)):
        for part in held:
            for at in part:
                found[number[at]].add(rank)
    return found


def test_one_document_is_divided_in_zigzag_over_all_ranks() -> None:
    assert divided((16,), 4, 100) == tuple(zigzag(16, 4, rank) for rank in range(4))


def test_equal_short_documents_are_whole_and_long_ones_take_as_many_ranks_as_their_work_needs() -> None:
    """Worked out by hand, for shares of 64 tokens."""
    assert [len(ranks) for ranks in of_documents((32,) * 8, 4, 1)] == [1] * 8
    assert [len(ranks) for ranks in of_documents((128, 64, 64), 4, 10_000)] == [2, 1, 1]
    degrees = [len(ranks) for ranks in of_documents((128, 64, 64), 4, 1)]
    assert degrees[0] > 2, "where attention is all of the work, the long document has 8/12 of it"
    assert [len(ranks) for ranks in of_documents((96, 96, 16, 16, 16, 16), 4, 10_000)] == [2, 2, 1, 1, 1, 1]
    # a rank with half of a long document has room for 16 tokens, so one of 32 is divided to fill it
    assert [len(ranks) for ranks in of_documents((96, 96, 32, 32), 4, 10_000)] == [2, 2, 2, 2]


def test_the_pairs_of_a_part_are_those_that_one_counts() -> None:
    assert pairs_of(2, 5) == 3 + 4 + 5


BY_HAND = {
    # a portion of one token is from the end, and a whole document lies where there is room
    ((3, 1), 2, 1000): ([range(2, 4)], [range(2)]),
    # ranks with the fewest pairs are first, and of those the ranks with the most room
    ((4, 4), 4, 1000): ([range(1), range(3, 4)], [range(1, 3)], [range(4, 5), range(7, 8)], [range(5, 7)]),
    # where no equal portions fit, the rank with the most room is filled first
    ((3, 3), 3, 1000): ([range(2, 3), range(4, 5)], [range(2)], [range(3, 4), range(5, 6)]),
    # the limit of pairs takes more ranks than the length, and the second document ranks by their pairs
    ((4, 2), 3, 1): ([range(3, 5)], [range(2, 3), range(5, 6)], [range(2)]),
    # the busiest rank has exactly the 94 pairs that are close enough, so 63 exchanged tokens are better than 72
    ((9, 8, 19), 3, 16): (
        [range(2), range(7, 9), range(11, 12), range(13, 14), range(17, 20), range(33, 36)],
        [range(2, 7), range(12, 13), range(20, 23), range(30, 33)],
        [range(9, 11), range(14, 17), range(23, 30)],
    ),
}


@pytest.mark.parametrize(("sample", "expected"), BY_HAND.items(), ids=["end", "room", "most room", "limit", "close"])
def test_small_samples_are_divided_as_the_rules_say(
    sample: tuple[tuple[int, ...], int, int], expected: tuple[list[range], ...]
) -> None:
    assert divided(*sample) == tuple(map(tuple, expected))


def test_long_tailed_documents_leave_ranks_close_to_equal_work() -> None:
    draw, equal_length = random.Random(3), 53_000
    for size in (2, 8, 16):
        worst, static = 0.0, 0.0
        for _ in range(10):
            lengths, rest = [], 131_072
            while rest:
                lengths.append(min(rest, max(16, int(draw.lognormvariate(7.6, 1.8)))))
                rest -= lengths[-1]
            draw.shuffle(lengths)
            for held, before in (
                (divided(tuple(lengths), size, equal_length), False),
                (tuple(zigzag(131_072, size, rank) for rank in range(size)), True),
            ):
                work = [work_of(lengths, one, equal_length) for one in held]
                unequal = max(work) * size / sum(work)
                worst, static = (worst, max(static, unequal)) if before else (max(worst, unequal), static)
        assert worst <= CLOSE + 1e-4 < 1.15 < static


SIGHTS = st.builds(Sight, st.booleans(), st.none() | st.integers(1, 40))


@given(packed(samples=2), EQUAL, SIGHTS)
def test_every_query_sees_every_key_of_its_document_once_and_nothing_is_received_of_whole_documents(
    sample: tuple[int, list[tuple[int, ...]]], equal_length: int, sight: Sight
) -> None:
    size, rows = sample
    total = 2 * sum(rows[0])
    of = torch.tensor([n for n, length in enumerate(one for row in rows for one in row) for _ in range(length)])
    seen, at = torch.zeros(total, total, dtype=torch.int64), torch.arange(total)
    for needs in needs_of(tuple(rows), size, equal_length, sight):
        own = torch.tensor([p for part in needs.held for p in part])
        pairs = (of[own][:, None] == of[own]).long()
        seen[own[:, None], own] += pairs.tril() if sight.causal else pairs
        assert torch.equal(torch.bincount(of[own], minlength=len(needs.lengths)), torch.tensor(needs.lengths))
        keys = [p for part in needs.keys for p in part]
        assert len(set(keys)) == len(keys)
        assert set(keys).isdisjoint(own.tolist())
        assert set(of[keys].tolist()) <= set(of[own].tolist())
        for part in needs.parts:
            for gap in part:
                queries, others = ([p for one in ranges for p in one] for ranges in (gap.queries, gap.keys))
                seen[torch.tensor(queries)[:, None], torch.tensor(others)] += 1
    expected = (of[:, None] == of).long()
    expected = expected.tril() if sight.causal else expected
    if sight.window is not None:  # parts with windows are masked by position
        visible = (at[:, None] - at).abs() < sight.window
        seen, expected = seen * visible, expected * visible
    assert torch.equal(seen, expected)


@given(packed() | packed(samples=2), EQUAL, st.booleans())
def test_rows_travel_to_the_ranks_that_hold_them_in_zigzag_and_back(
    sample: tuple[int, list[tuple[int, ...]]], equal_length: int, back: bool
) -> None:
    size, rows = sample
    total, width = sum(rows[0]), max(map(len, rows))
    filled = tuple(row + (0,) * (width - len(row)) for row in rows)

    def positions(shares: list[tuple[range, ...]]) -> Tensor:
        """The positions of a rank, numbered through the samples."""
        return torch.tensor([n * total + p for n, share in enumerate(shares) for part in share for p in part])

    by_documents = [positions([divided(row, size, equal_length)[rank] for row in filled]) for rank in range(size)]
    chunks = [positions([zigzag(total, size, rank)] * len(filled)) for rank in range(size)]
    before, after = (chunks, by_documents) if back else (by_documents, chunks)
    moves = [moves_of(filled, rank, size, equal_length, back, torch.device("cpu")) for rank in range(size)]
    sent = [held[one.sent].split(one.counts_sent) for held, one in zip(before, moves, strict=True)]
    for rank, one in enumerate(moves):
        received = [of[rank] for of in sent]
        assert tuple(map(len, received)) == one.counts_received
        assert torch.equal(torch.cat(received)[one.received], after[rank])


# What ranks compute together.

S = 48
ROWS = (
    ((48,), (24, 24)),
    ((17, 1, 6, 13, 11, 0), (1, 22, 2, 1, 1, 21)),
    ((1,) * 40 + (8,), (8,) + (1,) * 40),
    ((12, 12, 12, 12), (47, 1, 0, 0)),
)
"""The documents of two samples: whole samples, odd lengths, 40 of one token, whole ones on four ranks."""
SPECS = [
    (AttentionSpec(0.7, K, K, documents=True), 4),
    (AttentionSpec(0.7, K, K, documents=True, sinks=True), 1),
    (AttentionSpec(0.7, K, K, causal=False, documents=True), 2),
    (AttentionSpec(0.7, K, K, window=5, documents=True), 2),
    (AttentionSpec(0.7, K, K, window=17, documents=True, sinks=True), 4),
    (AttentionSpec(0.7, K, K, causal=False, window=4, documents=True), 2),
]
Case = tuple[tuple[tuple[int, ...], ...], AttentionSpec, int, int]
CASES: list[Case] = [
    (rows, spec, groups, (1, 10_000)[(of_rows + of_spec) % 2])
    for of_rows, rows in enumerate(ROWS)
    for of_spec, (spec, groups) in enumerate(SPECS)
]


def padded(rows: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    width = max(map(len, rows))
    return tuple(row + (0,) * (width - len(row)) for row in rows)


def differentiated(core: Callable[..., Tensor], case: Case, held: list[list[int]]) -> dict[str, Tensor]:
    """Output and gradients of the positions that are held of each sample, and the gradient of the sinks."""
    rows, spec, kv_heads, _ = case
    generator = torch.Generator().manual_seed(kv_heads)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    def own(x: Tensor) -> Tensor:
        return torch.stack([sample[positions] for sample, positions in zip(x, held, strict=True)])

    *qkv, gradient = (drawn(B, S, heads, K) for heads in (H, kv_heads, kv_heads, H))
    leaves = [own(x).requires_grad_() for x in qkv]
    sinks = drawn(H).requires_grad_() if spec.sinks else None
    output = core(*leaves, spec, AttentionInputs(None, torch.tensor(padded(rows)), sinks=sinks, num_heads=H))
    found = torch.autograd.grad(output, [*leaves, *([sinks] if sinks is not None else [])], own(gradient))
    return dict(zip(("output", "dq", "dk", "dv", "sinks"), (output.detach(), *found), strict=False))


def positions_of(case: Case, size: int, rank: int) -> list[list[int]]:
    rows, _, _, equal_length = case
    return [[p for part in divided(row, size, equal_length)[rank] for p in part] for row in padded(rows)]


def multiplied(case: Case) -> tuple[bool, bool, bool]:
    """Be one rank: whether a core over zigzag chunks gets their rows and a weight as it is, and what returns is right.

    Two ranks of three are a group. The core multiplies x by the positions of its rows. The weight has the shape of x
    without its last dimension.
    """
    groups, seen = [dist.new_group(ranks) for ranks in ([0, 2], [1])], list[bool]()
    group: Any = groups[dist.get_rank() % 2]
    size, rank = group.size(), group.rank()
    own, chunks = torch.tensor(positions_of(case, size, rank)), [p for part in zigzag(S, size, rank) for p in part]
    samples = torch.arange(B)[:, None] * S
    weight, places = torch.rand(own.shape), torch.tensor([chunks] * B)

    def inner(x: Tensor, given: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, None]:
        seen.append(torch.equal(x[..., 0], (samples + places).double()) and given is weight)
        return x * places[..., None], None

    x = (samples + own).double()[..., None].requires_grad_()
    inputs = AttentionInputs(None, torch.tensor(padded(case[0])))
    y, _ = in_zigzag(group, case[3], inner)(x, weight, case[1], inputs)
    y.backward(torch.ones_like(y) + y.detach())
    right = ((samples + own) * own).double()
    return seen == [True], torch.equal(y[..., 0], right), torch.equal(x.grad[..., 0], (1 + right) * own)


def test_a_core_over_zigzag_chunks_gets_their_rows_and_its_result_and_gradients_return() -> None:
    assert run_workers(3, multiplied, (ROWS[1], SPECS[0][0], 1, 10_000)) == [(True, True, True)] * 3


def of_a_rank(cases: list[Case]) -> list[dict[str, Tensor]]:
    size, rank, found = dist.get_world_size(), dist.get_rank(), []
    for case in cases:
        core = by_parts(partial(by_documents, case[3]), dist.group.WORLD, DOT_PRODUCT)
        found.append(differentiated(core, case, positions_of(case, size, rank)))
    return found


@pytest.mark.parametrize(("size", "every"), [(2, 5), (2, 1), (4, 1)])
@pytest.mark.wide("layouts", quick=["2-5"])
def test_ranks_together_compute_the_attention_of_one(size: int, every: int) -> None:
    cases = CASES[::every]
    for case, *ranks in zip(cases, *run_workers(size, of_a_rank, cases), strict=True):
        right = differentiated(scaled_dot_product, case, [list(range(S))] * B)
        for name in ("output", "dq", "dk", "dv"):
            whole = torch.full_like(right[name], torch.nan)
            for rank, found in enumerate(ranks):
                for sample, positions in enumerate(positions_of(case, size, rank)):
                    whole[sample, positions] = found[name][sample]
            assert float((whole - right[name]).abs().max()) < 1e-12, f"{case}: {name}"
        if case[1].sinks:
            assert float((sum(found["sinks"] for found in ranks) - right["sinks"]).abs().max()) < 1e-12, f"{case}"


def sizes_of_messages(rows: tuple[tuple[int, ...], ...]) -> tuple[bool, int, int]:
    call = Call(torch.tensor(rows), None, None, 1.0, True, None, dist.group.WORLD.group_name)
    exchange = exchange_of(call, 10_000, torch.device("cpu"))
    return exchange.is_needed, sum(exchange.counts_sent), sum(exchange.counts_received)


def test_documents_that_are_whole_on_a_rank_are_not_exchanged() -> None:
    assert run_workers(2, sizes_of_messages, ((12, 12, 12, 12),)) == [(False, 0, 0)] * 2
    found = run_workers(2, sizes_of_messages, ((32, 16),))
    assert all(needed for needed, _, _ in found)
    assert sum(sent for _, sent, _ in found) == sum(received for _, _, received in found)
    assert max(received for _, _, received in found) <= 32, "at most the keys of the divided document"
