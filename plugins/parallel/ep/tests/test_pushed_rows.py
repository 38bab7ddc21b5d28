"""Rows that kernels write into the memory of other GPUs: their places, the kernel, and what is refused.

R ranks, E bins, N rows of a rank, M places, D width. One process is all ranks.
"""

import os
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import mplug_ep.mailbox
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mplug_ep import ExpertParallel
from mplug_ep.bounds import Bounds
from mplug_ep.mailbox import Mailbox, Turns
from mplug_ep.places import NOWHERE, Places, places_of
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mplug import UsageError


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[list[int]], int, int]:
    """(the counts [R, E] of all ranks, N, M): some rows are of no bin, and there may be too few places."""
    size, each = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 3))
    count = st.integers(0, draw(st.sampled_from([0, 1, 5])))
    counts = draw(st.lists(st.lists(count, min_size=size * each, max_size=size * each), min_size=size, max_size=size))
    num_rows = max(map(sum, counts)) + draw(st.integers(0, 2))
    return counts, num_rows, draw(st.integers(0, size * num_rows + 1))


def arrived(counts: list[list[int]], owner: int, num_places: int) -> list[tuple[int, int]]:
    """(sender, number among its rows) of the rows that have a place on rank `owner`: by bin, within a bin by sender."""
    size = len(counts)
    each = len(counts[0]) // size
    rows = [
        (sender, sum(counts[sender][:bin_]) + number)
        for bin_ in range(owner * each, (owner + 1) * each)
        for sender in range(size)
        for number in range(counts[sender][bin_])
    ]
    return rows[:num_places]


@settings(max_examples=80, derandomize=True)
@given(loads())
def test_every_row_has_the_place_of_its_bin_and_knows_its_way_back(load: tuple[list[list[int]], int, int]) -> None:
    counts, num_rows, num_places = load
    size = len(counts)
    ways = [places_of(torch.tensor(counts), rank, num_rows, num_places) for rank in range(size)]
    for owner, way in enumerate(ways):
        expected = arrived(counts, owner, num_places)
        assert len(expected) == int(way.counts.sum())
        found = list(zip(way.back_rank.tolist(), way.back_place.tolist(), strict=True))
        assert found[: len(expected)] == expected
        assert {rank for rank, _ in found[len(expected) :]} <= {NOWHERE}
        for place, (sender, number) in enumerate(expected):
            assert (int(ways[sender].rank[number]), int(ways[sender].place[number])) == (owner, place)
    kept = sum(int((way.rank != NOWHERE).sum()) for way in ways)
    assert kept == sum(len(arrived(counts, owner, num_places)) for owner in range(size))
    assert [int(way.lost) + int((way.rank != NOWHERE).sum()) for way in ways] == [sum(row) for row in counts]


COUNTS = [[2, 0, 1, 3], [0, 4, 0, 1]]


def test_no_view_is_searched_because_torch_2_11_compiles_that_wrongly() -> None:
    graph = make_fx(lambda counts: places_of(counts, 1, 8, 6))(torch.tensor(COUNTS)).graph
    searched = [node.args[0].target for node in graph.nodes if node.target is torch.ops.aten.searchsorted.Tensor]
    assert searched == [torch.ops.aten.cumsum.default] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("own", [0, 1])
def test_on_a_gpu_compiled_places_are_those_of_eager_torch(own: int) -> None:
    counts = torch.tensor(COUNTS, device="cuda")
    found, right = (call(counts, own, 8, 6) for call in (torch.compile(places_of, fullgraph=True), places_of))
    for one, other in zip(found, right, strict=True):
        assert torch.equal(one, other)


# The kernel, among the memories of one device.

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or not (INTERPRETED or torch.cuda.is_available()),
    reason="the kernel needs Triton and a GPU, or TRITON_INTERPRET=1",
)


def pushed(parts: list[Tensor], ways: list[Places], num_places: int, back: bool) -> list[Tensor]:
    """What every rank has in its memory after all of them have written; 7 where none has."""
    memory = [torch.full((num_places, parts[0].shape[1]), 7.0).to(DEVICE, parts[0].dtype) for _ in parts]
    addresses = torch.tensor([one.data_ptr() for one in memory], device=DEVICE)
    for rows, way in zip(parts, ways, strict=True):
        rank, place = (way.back_rank, way.back_place) if back else (way.rank, way.place)
        mplug_ep.mailbox.push(rows, rank, place, addresses)
    return memory


@needs_triton
@pytest.mark.parametrize(("width", "dtype"), [(3, torch.float32), (33, torch.bfloat16), (64, torch.bfloat16)])
@pytest.mark.parametrize("num_places", [4, 40])
def test_the_kernel_writes_rows_to_their_places_and_back(width: int, dtype: torch.dtype, num_places: int) -> None:
    counts = torch.tensor(COUNTS, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(8, width, generator=generator).to(DEVICE, dtype) for _ in range(2)]
    ways = [places_of(counts, rank, 8, num_places) for rank in range(2)]
    memory = pushed(parts, ways, num_places, back=False)
    for owner in range(2):
        expected = [parts[sender][number] for sender, number in arrived(counts.tolist(), owner, num_places)]
        assert torch.equal(memory[owner][: len(expected)], torch.stack(expected))
        assert (memory[owner][len(expected) :] == 7).all()
    for sender, own in enumerate(pushed(memory, ways, 8, back=True)):
        sent = ways[sender].rank != NOWHERE
        assert torch.equal(own[sent], parts[sender][sent])
        assert (own[~sent] == 7).all()
        taken = mplug_ep.mailbox.take(own, ways[sender].rank)
        assert torch.equal(taken, parts[sender].where(sent[:, None], 0))


# Which memory ranks write into.


@settings(max_examples=80, derandomize=True)
@given(st.lists(st.integers(0, 3), max_size=40))
def test_no_exchange_gets_a_memory_before_another_one_has_started_since_it_was_read(order: list[int]) -> None:
    """In any order: 0 starts an exchange, and n reads what the n-th of those that travel has brought."""
    turns, travelling, has_started = Turns(), list[int](), dict[int, bool]()
    for what in order:
        if what == 0:
            number = turns.start()
            assert has_started.pop(number, True), "another rank may not have read it"
            assert number not in travelling
            travelling.append(number)
            has_started = dict.fromkeys(has_started, True)
        elif what <= len(travelling):
            turns.has_read(number := travelling.pop(what - 1))
            has_started[number] = False


def test_exchanges_that_are_read_at_once_have_two_memories_in_turn_and_those_of_two_parts_three() -> None:
    alone, parts = Turns(), Turns()
    found = []
    for _ in range(4):
        found.append(alone.start())
        alone.has_read(found[-1])
    assert found == [0, 1, 0, 1]
    used = set[int]()
    for _ in range(3):  # layers
        rows = [parts.start(), parts.start()]
        back = [(parts.has_read(number), parts.start())[1] for number in rows]
        used.update(rows, back)
        for number in back:
            parts.has_read(number)
    assert used == {0, 1, 2}


# What a graph can replay.


def test_a_step_begins_with_the_first_memory_however_many_exchanges_the_last_one_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mailbox = Mailbox(None)  # type: ignore[arg-type]
    monkeypatch.setitem(mplug_ep.mailbox.MAILBOXES, "some", mailbox)
    module: Any = SimpleNamespace(training=True)
    bounds = Bounds(SimpleNamespace(module=module), 1.0)  # type: ignore[arg-type]
    check = bounds.check(SimpleNamespace(device="cpu", largest=lambda own: own))  # type: ignore[arg-type]
    for lost in (0, 2):
        assert [mailbox._turns.start() for _ in range(3)] == [0, 1, 2]
        bounds.count(torch.tensor(lost))
        assert check() is (lost == 0)


def test_only_exchanges_of_a_fixed_size_can_be_replayed() -> None:
    def answer(**fields: Any) -> bool | str:
        return ExpertParallel(ExpertParallel.Config(**fields)).captures()

    assert answer(dispatch="symmetric") is answer(dispatch="bounded") is True
    assert "wait for a number of rows (parallel.ep.dispatch=once_per_rank)" in str(answer(dispatch="once_per_rank"))
    assert "with parallel.ep.overlap=true" in str(answer(dispatch="bounded", overlap=True))
    assert "with parallel.ep.parts=2" in str(answer(dispatch="bounded", parts=2))
    assert "with parallel.ep.dispatch=all_gather" in str(answer(dispatch="all_gather"))


# What is refused.


def test_a_run_on_the_cpu_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="symmetric writes rows into the memory of other GPUs, and this run is on the"):
        mplug_ep.mailbox.open_mailbox(SimpleNamespace(device="cpu"), None)  # type: ignore[arg-type]


def test_gpus_that_do_not_reach_each_other_are_refused_with_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = SimpleNamespace(group_name="far")
    monkeypatch.setattr("mplug_ep.mailbox.triton_builds", lambda: True)
    monkeypatch.setattr("mplug_ops.reachable", lambda _: False)
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda _: [3, 11])
    run: Any = SimpleNamespace(device="cuda", hooks=SimpleNamespace(implementers=lambda _: []))
    with pytest.raises(UsageError, match=r"those of the ranks 3, 11, which share experts, may not; use parallel\.ep"):
        mplug_ep.mailbox.open_mailbox(run, group)
    run.hooks.implementers = lambda _: ["extensions/heal"]
    with pytest.raises(UsageError, match=r"cannot go on \(extensions/heal\)"):
        mplug_ep.mailbox.open_mailbox(run, group)
