"""Bubbles of the tables beside the formulas and the tables of the papers, and their order beside torch's."""

from collections.abc import Callable
from typing import Any

import pytest
from mplug_pp.limited import zb_limited
from mplug_pp.schedules import gpipe, interleaved, one_f_one_b, zb_h1
from mplug_pp.v_shaped import dualpipe_v, zb_v

from mplug_schedules import COMPUTE, Costs, Row, Shape, Table, timeline

Schedule = Callable[[Shape], Table]


def idle(schedule: Schedule, shape: Shape, costs: Costs) -> float:
    """The idle time of the rank that takes longest, in the costs' unit."""
    table = schedule(shape)
    times = timeline(table, costs)
    return times.longest_row - times.busy(0)


@pytest.mark.parametrize("p", [4, 8, 16])
@pytest.mark.parametrize("costs", [Costs(), Costs(1, 1.2, 0.8)], ids=["equal", "unequal"])
@pytest.mark.wide("layouts", quick=["equal-4", "equal-8", "unequal-4", "unequal-8"])
def test_the_bubbles_are_those_of_the_formulas(p: int, costs: Costs) -> None:
    """GPipe, 1F1B: 2104.04473, 2.2. ZB: 2401.10241, tables 2 and 6. DualPipeV: its README. p ranks, v chunks."""
    f, i, w, m = costs.forward, costs.input_gradient, costs.weight_gradient, 4 * p
    whole = (p - 1) * (f + i + w)
    assert idle(gpipe, Shape(p, m), costs) == pytest.approx(whole)
    assert idle(one_f_one_b, Shape(p, m), costs) == pytest.approx(whole)
    for v in (2, 4):  # a chunk takes 1/v of a rank's time, which is the unit here
        assert idle(interleaved, Shape(p, m, v), costs) == pytest.approx(whole)
    assert idle(zb_h1, Shape(p, m), costs) == pytest.approx((p - 1) * (f + i - w))
    assert idle(zb_limited, Shape(p, m), costs) == pytest.approx((p - 1) * (f + i - w))
    assert idle(zb_limited, Shape(p, m, limit=2 * p - 1), costs) == pytest.approx((p - 1) * (f + i - 2 * w))
    assert idle(dualpipe_v, Shape(p, m), costs) <= (p - 1) * (f + 2 * (i + w) - 3 * w) + 1e-9
    if costs == Costs():
        assert idle(zb_v, Shape(p, m), costs) == 0


MODELS = {
    ("1.5B", 24): (8, 3, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1055, 0.1585, 0.1083)),
    ("1.5B", 64): (8, 3, (18.522, 18.086, 9.337, 0.601), (0.1240, 0.0443, 0.0674, 0.0444)),
    ("6.2B", 24): (8, 4, (29.718, 29.444, 19.927, 0.527), (0.2347, 0.0808, 0.1323, 0.0698)),
    ("6.2B", 64): (8, 4, (29.718, 29.444, 19.927, 0.527), (0.1091, 0.0320, 0.0554, 0.0294)),
    ("14.6B", 48): (16, 3, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1104, 0.1397, 0.0672)),
    ("28.3B", 96): (32, 2, (10.419, 10.207, 7.715, 0.408), (0.2646, 0.1493, 0.1421, 0.0641)),
}
"""Tables 3, 5 and 6 of arXiv 2401.10241: (model, m) -> p, layers per rank, measured times, and bubbles of 1F1B,
interleaved 1F1B with one layer per chunk, ZB-H1 and ZB-H2."""


@pytest.mark.parametrize(("model", "m"), MODELS)
@pytest.mark.wide("layouts", quick=["1.5B-24", "6.2B-24", "14.6B-48"])
def test_with_the_times_that_the_paper_measured_the_bubbles_are_at_most_the_papers(model: str, m: int) -> None:
    """The paper's first and last chunk have a layer less, so its interleaved bubble is 3 to 4% smaller."""
    p, layers, (f, i, w, transfer), (plain, loop, h1, h2) = MODELS[model, m]

    def bubble(schedule: Schedule, parts: int = 1, **more: Any) -> float:
        costs = Costs(f / parts, i / parts, w / parts, transfer)
        return timeline(schedule(Shape(p, m, **more)), costs).bubble_of_papers

    assert bubble(one_f_one_b) <= plain + 5e-5
    assert bubble(zb_h1) <= h1 + 5e-5
    assert bubble(zb_limited, limit=2 * p - 1) <= h2 + 5e-5
    assert bubble(interleaved, layers, chunks=layers) <= loop * 1.04
    assert bubble(zb_v, 2) < h1


# An independent implementation.


class Recorder:
    """Stands for a stage, and notes what a schedule makes it do."""

    has_backward = True

    def __init__(self, stage_index: int, num_stages: int) -> None:
        self.stage_index, self.num_stages, self.done = stage_index, num_stages, list[str]()
        self.is_first, self.is_last = stage_index == 0, stage_index == num_stages - 1

    def forward_one_chunk(self, number: int, *_: object, **__: object) -> None:
        self.done.append(f"{self.stage_index}F{number}")

    def backward_one_chunk(self, number: int, *_: object, **__: object) -> None:
        self.done.append(f"{self.stage_index}B{number}")

    def __getattr__(self, name: str) -> Callable[..., list[object]]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: []  # no transfers


def run_by_torch(kind: str, num_stages: int, number: int) -> list[list[str]]:
    """What torch's own GPipe or 1F1B makes each stage do.

    The loop that runs, not `_get_pipeline_order`: that plan, which only the visualizer reads, leaves F0 out of the last
    stage. The constructor is passed over, because it refuses fewer micro batches than stages.
    """
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    rows, batches = [], [()] * number
    for stage in range(num_stages):
        recorder, schedule = Recorder(stage, num_stages), object.__new__(getattr(schedules, kind))
        vars(schedule).update(_stage=recorder, _num_stages=num_stages, _n_microbatches=number, scale_grads=False)
        vars(schedule).update(_has_backward=True, _stage_forward_initialized=True, _stage_initialized=True)
        for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
            setattr(schedule, name, lambda *_, **__: None)
        schedule._step_microbatches(batches, [{}] * number)
        rows.append(recorder.done)
    return rows


def planned_by_torch(kind: str, p: int, chunks: int, number: int) -> list[list[str]]:
    """The computations that torch's schedule of several chunks plans for each rank, which its runtime follows."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = object.__new__(getattr(schedules, kind))
    rounds = max(1, number // p)
    vars(schedule).update(pp_group_size=p, n_local_stages=chunks, _n_microbatches=number, _num_stages=p * chunks)
    vars(schedule).update(num_stages=p * chunks, number_of_rounds=rounds, microbatches_per_round=number // rounds)
    rows = []
    for rank in range(p):
        planned = [action for action in schedule._calculate_single_rank_operations(rank) if action is not None]
        flat = [part for action in planned for part in (action.sub_actions or (action,))]
        names = {"FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FORWARD": "F"}
        rows.append([f"{a.stage_index}{names[a.computation_type.name]}{a.microbatch_index}" for a in flat])
    return rows


def words(row: Row) -> list[str]:
    return [f"{a.chunk}{a.kind.value}{a.micro_batch}" for a in row if a.kind in COMPUTE]


@pytest.mark.parametrize("p", [2, 3, 8])
@pytest.mark.parametrize(("kind", "schedule"), [("ScheduleGPipe", gpipe), ("Schedule1F1B", one_f_one_b)])
def test_gpipe_and_1f1b_compute_in_the_order_in_which_torch_runs(kind: str, schedule: Schedule, p: int) -> None:
    for number in (2, 3, 7, 16, 32):
        assert [words(row) for row in schedule(Shape(p, number)).rows] == run_by_torch(kind, p, number)


PLANNED: dict[str, tuple[Schedule, tuple[int, ...]]] = {
    "ScheduleInterleaved1F1B": (interleaved, (2, 3)),
    "ScheduleInterleavedZeroBubble": (zb_h1, (1, 2)),
    "ScheduleZBVZeroBubble": (zb_v, (2,)),
    "ScheduleDualPipeV": (dualpipe_v, (2,)),
}


@pytest.mark.parametrize("kind", PLANNED)
@pytest.mark.parametrize("p", [2, 3, 8])
def test_schedules_of_chunks_compute_in_the_order_that_torch_plans(kind: str, p: int) -> None:
    schedule, numbers = PLANNED[kind]
    for chunks in numbers:
        for m in (2 * p, 3 * p, 5 * p):
            rows = schedule(Shape(p, m, chunks)).rows
            assert [words(row) for row in rows] == planned_by_torch(kind, p, chunks, m), (chunks, m)
