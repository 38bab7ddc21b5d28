"""The bytes that a rank holds during a table, against counts by hand."""

import pytest
from mplug_pp import extrapolated

from mplug_schedules import (
    Action,
    Footprint,
    Kind,
    Shape,
    Table,
    held_bytes,
    peak,
    peak_bytes,
    proven_table,
    with_transfers,
)

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741


def test_each_action_holds_what_is_counted_by_hand() -> None:
    """Two ranks, one micro batch: rank 1 receives 8 bytes, keeps 100 with them, and 40 for its weight gradients."""
    rows = ((Action(F, 0, 0), Action(B, 0, 0)), (Action(F, 0, 1), Action(I, 0, 1), Action(W, 0, 1)))
    table = with_transfers(rows, (0, 1))
    first = Footprint(kept=50, upstream=8, beyond={F: 70, B: 20})
    second = Footprint(kept=100, postponed=40, inputs=8, beyond={F: 130, I: 60, W: 5})
    assert [(str(one), held) for one, held in held_bytes(table, 0, [first, second])] == [
        ("F0 of chunk 0", 70),  # 50 and the output of 8 remain
        ("SF0 of chunk 0 to rank 1", 58),
        ("RB0 of chunk 0 from rank 1", 58),
        ("B0 of chunk 0", 58 + 20),
    ]
    assert [held for _, held in held_bytes(table, 1, [first, second])] == [
        8,  # received
        8 + 130,  # the forward pass
        100 + 60,  # the gradients of activations; 40 and the gradient of 8 remain
        48,  # the send
        40 + 5,
    ]


def test_chunks_of_one_rank_hand_over_activations_and_gradients_that_count() -> None:
    rows = (tuple(Action(kind, 0, chunk) for kind, chunk in ((F, 0), (F, 1), (B, 1), (B, 0))),)
    table = Table(rows, (0, 0))
    chunks = [Footprint(kept=10, upstream=3, beyond={B: 1}), Footprint(kept=20, inputs=3, beyond={B: 9})]
    # after F0: 10 and the output of 3, which becomes an input of chunk 1; after B1: 10 and its gradient of 3
    assert [held for _, held in held_bytes(table, 0, chunks)] == [13, 30, 39, 14]


def test_bytes_without_transfers_and_passes_are_the_peak_of_micro_batches() -> None:
    for schedule in ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"):
        table = proven_table(schedule, Shape(4, 8))
        share = len(table.chunks_of(0))
        chunks = [Footprint(kept=1200 // share, postponed=1200 // share)] * len(table.ranks)
        assert [peak_bytes(table, rank, chunks) for rank in range(4)] == [1200 * peak(table, rank) for rank in range(4)]


SCHEDULES = ("1f1b", "dualpipe-v", "gpipe", "interleaved", "zb-h1", "zb-limited", "zb-v")


@pytest.mark.parametrize(("schedule", "ranks"), [*((name, 2) for name in SCHEDULES), ("interleaved", 9)])
def test_the_peaks_of_a_long_table_follow_from_shorter_ones(schedule: str, ranks: int) -> None:
    """With nine ranks, eight micro batches are over: as many groups as can be are larger than the others."""
    asked = list[int]()

    def peaks(number: int) -> list[float]:
        asked.append(number)
        table = proven_table(schedule, Shape(ranks, number))
        return [peak(table, rank) for rank in range(ranks)]

    number = 12 * ranks + ranks - 1
    found = extrapolated(peaks, ranks, number)
    assert max(asked) < number
    assert found == peaks(number)
