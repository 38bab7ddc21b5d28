"""Evaluation follows the forward half of each schedule's table, and a step sends the bytes that `explain` predicts."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from mplug_pp.wire import Wire

from mplug.training.assembly import build
from mplug_schedules import Kind, Shape, bytes_sent, check, forward_half, proven_table
from mplug_testing import run_workers
from mplug_testing.harness import tiny_run
from mplug_validation import evaluate

Settings = dict[str, Any]
Found = dict[str, Any]

QUICK = ("1f1b", "interleaved", "zb-v")
OTHERS = ("gpipe", "zb-h1", "zb-limited", "dualpipe-v")
STEP, SAMPLES = 5, 7
"""Micro batches of a step, and samples of an evaluation: it follows the table once, and again for the remaining two."""
RUN: Settings = {
    "trainer.micro_batch_size": 1,
    "trainer.global_batch_size": STEP,
    "trainer.eval_samples": SAMPLES,
    "trainer.precision": "fp64",
}


def ran(schedules: tuple[str, ...], settings: Settings) -> list[Found]:
    """Be one rank: train two steps and evaluate, with each schedule.

    `order` are the (chunk, micro batch) of the evaluation, `sent` the bytes of the second step, in which nothing is
    announced, and `predicted` those that the table predicts.
    """
    return [_ran({**settings, "parallel.pp.schedule": schedule}) for schedule in schedules]


def _ran(settings: Settings) -> Found:
    run = tiny_run(settings)
    parts, sent, order = build(run), list[int](), list[tuple[int, int]]()
    stepper: Any = parts.stepper
    send, forward = Wire.send, stepper.do[Kind.FORWARD]

    def counting(wire: Wire, tensors: Iterable[torch.Tensor]) -> None:
        tensors = list(tensors)
        sent.extend(tensor.nbytes for tensor in tensors)
        send(wire, tensors)

    def recording(chunk: int, number: int, peer: int | None) -> None:
        order.append((chunk, number))
        forward(chunk, number, peer)

    for step in (1, 2):
        run.step = step
        with pytest.MonkeyPatch.context() as patch:
            sent.clear()
            patch.setattr(Wire, "send", counting)
            stepper.forward_backward(parts.train_loader.take(run.config.trainer.global_batch_size), step)
    stepper.do[Kind.FORWARD] = recording
    (number,) = run.micro_batch_counts()
    table = parts.model.stages.table(number)
    loss = evaluate(run, parts)
    return {
        "order": order,
        "sent": sum(sent),
        "predicted": bytes_sent(run, parts.model, table, stepper.rank),
        "loss": loss,
    }


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("schedules", [QUICK, pytest.param(OTHERS, marks=pytest.mark.wide("layouts"))], ids=str)
def test_evaluation_runs_in_the_order_of_the_table_and_a_step_sends_the_predicted_bytes(
    schedules: tuple[str, ...],
) -> None:
    ranks = run_workers(2, ran, schedules, {**RUN, "parallel.layout": "pp2"})
    alone = tiny_run(RUN)
    expected = evaluate(alone, build(alone))
    for number, schedule in enumerate(schedules):
        table = proven_table(schedule, Shape(2, STEP))
        for rank, found in enumerate(one[number] for one in ranks):
            forwards = [(one.chunk, one.micro_batch) for one in table.rows[rank] if one.kind is Kind.FORWARD]
            rest = [(chunk, n) for chunk, n in forwards if n < SAMPLES - STEP]
            assert found["order"] == forwards + rest, (schedule, rank)
            assert found["loss"] == pytest.approx(expected, rel=1e-10)
            assert found["sent"] == found["predicted"] > 0, (schedule, rank)


@pytest.mark.wide("layouts")
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("tp2pp2", {}),
        ("tp2pp2", {"parallel.tp.sequence_parallel": False}),
        ("cp2pp2", {}),
        ("dp2pp2", {"trainer.global_batch_size": 2 * STEP}),
        ("pp2", {"trainer.precision": "bf16", "trainer.seq_length": 24}),
    ],
    ids=str,
)
def test_bytes_of_a_step_are_predicted_where_ranks_divide_the_sequence(layout: str, changes: Settings) -> None:
    schedules = ("1f1b", "zb-v")
    world = 2 if layout == "pp2" else 4
    for found in run_workers(world, ran, schedules, {**RUN, **changes, "parallel.layout": layout}):
        assert [one["sent"] for one in found] == [one["predicted"] for one in found]
        assert all(one["sent"] for one in found)


def test_the_forward_half_of_every_table_has_its_forwards_and_their_transfers_in_its_order() -> None:
    for schedule in QUICK + OTHERS:
        table = proven_table(schedule, Shape(4, 6))
        half = forward_half(table)
        assert half.ranks == table.ranks
        for row, whole in zip(half.rows, table.rows, strict=True):
            kinds = {Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD}
            assert list(row) == [one for one in whole if one.kind in kinds]
        with pytest.raises(ValueError, match="lacks B"):
            check(half, Shape(4, 6))
