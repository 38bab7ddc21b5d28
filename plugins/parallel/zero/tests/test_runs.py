"""What travels when, and that no switch changes a bit of the result."""

from typing import Any

import pytest
from mplug_zero.sums import Lane, Sums

from mplug import UsageError
from mplug.training.assembly import build
from mplug_sharding import Shard
from mplug_testing import run_workers
from mplug_testing.harness import Trace, difference, tiny_config, tiny_run, train_steps, weights_off

SMALL: dict[str, Any] = {"model.num_layers": 3, "parallel.zero.bucket_mib": 0.02}


def settings(layout: str, **changes: Any) -> dict[str, Any]:
    return {**SMALL, "parallel.layout": layout, **{name.replace("__", "."): value for name, value in changes.items()}}


# Event order.


def events(changes: dict[str, Any], num_steps: int) -> list[list[str]]:
    """Be one rank: of every step, when buckets are begun and ended, and when backward passes the first block."""
    told: list[str] = []
    begin, end = Sums.begin, Sums.end

    def recording_begin(self: Sums, lane: Lane, last: bool) -> None:
        told.append(f"begin {lane.shard.bucket.names[0]}")
        begin(self, lane, last)

    def recording_end(self: Sums, but: int = 0) -> None:
        told.extend("end" for _ in range(len(self._under_way) - but))
        end(self, but)

    Sums.begin, Sums.end = recording_begin, recording_end  # type: ignore[method-assign]
    run = tiny_run(changes)
    parts = build(run)
    parts.model.module.get_submodule("blocks.0").register_full_backward_hook(lambda *_: told.append("first block done"))
    found = []
    for step in range(1, num_steps + 1):
        parts.stepper.forward_backward(parts.train_loader.take(8), step)
        parts.stepper.update(1e-3, 0.1)
        found.append(list(told))
        told.clear()
    assert parts.model.shards is not None
    found.append([f"begin {shard.bucket.names[0]}" for shard in parts.model.shards.all])
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_every_bucket_but_the_last_is_begun_before_backward_ends_and_in_one_order(stage: int) -> None:
    for *steps, buckets in run_workers(2, events, settings("zero2", parallel__zero__stage=stage), 2):
        assert len(buckets) > 3
        for told in steps:
            passes = [at for at, event in enumerate(told) if event == "first block done"]
            assert len(passes) == 2  # micro batches of two samples
            begun = [event for event in told if event.startswith("begin")]
            assert begun == buckets * stage  # once a step, or once a backward pass
            last = told[passes[0] : passes[1]]
            assert [event for event in last if event.startswith("begin")][-len(buckets) + 1 :] == buckets[:-1]


@pytest.mark.parametrize("stage", [1, 2])
def test_without_overlap_nothing_travels_while_backward_computes(stage: int) -> None:
    changes = settings("zero2", parallel__zero__stage=stage, parallel__zero__overlap=False)
    for *steps, buckets in run_workers(2, events, changes, 1):
        for told in steps:
            begun = [at for at, event in enumerate(told) if event.startswith("begin")]
            assert len(begun) == len(buckets) * stage
            if stage == 1:
                assert min(begun) > max(at for at, event in enumerate(told) if event == "first block done")
            else:  # each sum is over before backward goes on
                assert [told[at + 1] for at in begun] == ["end"] * len(begun)


def memory(changes: dict[str, Any]) -> tuple[int, int, int]:
    """Be one rank: the most buckets that had gradients at once in a step, those of them after it, and all buckets."""
    present: set[int] = set()
    most: list[int] = []
    materialize, release = Shard.materialize, Shard.release

    def counted(self: Shard) -> None:
        materialize(self)
        present.add(id(self))
        most.append(len(present))

    def discounted(self: Shard) -> None:
        release(self)
        present.discard(id(self))

    parts = build(tiny_run(changes))
    Shard.materialize, Shard.release = counted, discounted  # type: ignore[method-assign]
    parts.stepper.forward_backward(parts.train_loader.take(8), 1)
    assert parts.model.shards is not None
    held = sum(shard.gradients.untyped_storage().nbytes() > 0 for shard in parts.model.shards.all)
    return max(most), held, len(parts.model.shards.all)


def test_in_stage_2_only_buckets_in_flight_have_memory() -> None:
    for most, after, buckets in run_workers(2, memory, settings("zero2", parallel__zero__stage=2, model__num_layers=6)):
        assert most <= buckets / 2
        assert after == 0


# Bits.


def trained(**changes: Any) -> list[Trace]:
    return run_workers(2, train_steps, settings("zero2", **changes))


@pytest.fixture(scope="module")
def replicas() -> Trace:
    """One of two replicas, which has everything."""
    return run_workers(2, train_steps, settings("dp2"))[0]


def test_stage_1_on_two_ranks_is_replicas_to_the_bit_but_for_the_norm() -> None:
    """Two terms have one order of summing. Squares for the norm are added up rank by rank, so no clipping here."""
    one = run_workers(2, train_steps, settings("dp2", trainer__max_grad_norm=0.0))[0]
    found = trained(trainer__max_grad_norm=0.0)
    for trace in found:
        assert trace.losses == one.losses
        assert trace.norms == pytest.approx(one.norms, rel=1e-6)
        trace.norms = one.norms
    assert difference(found, one, tolerance=0.0) == weights_off(found, one, tolerance=0.0) == ""


def bits(traces: list[Trace]) -> list[Any]:
    held = [[trace.initial, trace.weights, *trace.gradients] for trace in traces]
    values = [{n: [(s, x.tolist()) for s, x in boxes] for n, boxes in one.items()} for parts in held for one in parts]
    return [[(trace.losses, trace.norms, trace.val_loss) for trace in traces], values]


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("stage", [1, 2])
def test_overlap_changes_no_bit(stage: int) -> None:
    one, other = (trained(parallel__zero__stage=stage, parallel__zero__overlap=overlap) for overlap in (True, False))
    assert bits(one) == bits(other)


def test_a_format_in_which_gradients_are_not_summed_is_refused() -> None:
    with pytest.raises(UsageError, match=r"parallel\.zero\.reduce_dtype .*'bf61' is no format .* mean 'bf16'\?"):
        tiny_config({"parallel.layout": "zero2", "parallel.zero.reduce_dtype": "bf61"})


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("bf16", 0.02), pytest.param("fp16", 0.003, marks=pytest.mark.wide("precision"))]
)
def test_gradients_that_travel_in_16_bits_are_those_of_fp32_to_their_precision(
    replicas: Trace, dtype: str, tolerance: float
) -> None:
    found = trained(parallel__zero__reduce_dtype=dtype)
    assert difference(found, replicas, tolerance) == ""
    assert difference(found, replicas) != ""
