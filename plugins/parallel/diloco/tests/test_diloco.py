"""When fragments are exchanged, in which formats, what is refused, and that one worker changes nothing."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from mplug_diloco.outer import OuterOptimizer
from mplug_diloco.rounds import Rounds, fragments_of
from mplug_diloco.wire import Mean, bytes_sent, decoded, encoded, num_bytes

from mplug import UsageError
from mplug.model.build import build_model
from mplug.training.assembly import build
from mplug_estimates import measure_bytes
from mplug_saving.states import refuse_unsavable_states
from mplug_testing import run_workers
from mplug_testing.harness import tiny_config, tiny_run, train_steps

# Rounds.


@pytest.mark.parametrize(("every", "fragments", "delay"), [(1, 1, 0), (6, 3, 1), (12, 4, 2), (10, 1, 9)])
def test_every_fragment_is_exchanged_once_in_each_period_and_one_at_a_time(
    every: int, fragments: int, delay: int
) -> None:
    rounds, last = Rounds(every, fragments, delay, last=1000), 5 * every
    begun = [(step, fragment) for step in range(1, last + 1) for fragment in rounds.begins(step)]
    assert Counter(fragment for _, fragment in begun) == dict.fromkeys(range(fragments), 5)
    assert begun[:fragments] == [((one + 1) * every // fragments, one) for one in range(fragments)]
    assert {after - before for (before, _), (after, _) in pairwise(begun)} == {every // fragments}
    merged = [(step, fragment) for step in range(1, last + 1) for fragment in rounds.merges(step)]
    assert merged == [(step + delay, one) for step, one in begun if delay and step + delay <= last]


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_the_last_step_exchanges_everything_and_leaves_nothing_under_way(delay: int) -> None:
    for last in range(1, 20):
        rounds, under_way = Rounds(6, 2, delay, last), Counter[int]()
        for step in range(1, last + 1):
            under_way.subtract(rounds.merges(step))
            assert min(under_way.values(), default=0) >= 0
            begins = rounds.begins(step)
            if delay and step < last:
                under_way.update(begins)
        assert rounds.begins(last) == (0, 1)
        assert not +under_way


def test_a_fragment_has_every_n_th_unit_and_a_shared_parameter_belongs_to_its_first_unit() -> None:
    model = build_model(tiny_run({"model.num_layers": 4, "model.tie_embeddings": True}))
    of = fragments_of(model.plan, model.placements, 3)
    assert [of[name] for name in of if name.startswith("embedding.")] == [0]
    assert {of[name] for name in of if name.startswith("blocks.1.")} == {2}
    assert {of[name] for name in of if name.startswith("blocks.2.")} == {0}
    assert of.keys() == {name for name, one in model.placements.items() if one.parameter.trainable}


# Formats.


@pytest.mark.parametrize("number", [1, 255, 256, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wire", ["bf16", "int8", "int4"])
def test_the_error_of_a_format_is_within_its_bound(wire: str, dtype: torch.dtype, number: int) -> None:
    draw = torch.Generator().manual_seed(number)
    values = torch.randn(number, dtype=dtype, generator=draw) * 10 ** torch.randint(-6, 3, (number,), generator=draw)
    values[::7] = 0
    encoding = encoded(values, wire)
    assert encoding.dtype == torch.uint8
    assert len(encoding) == num_bytes(number, wire)
    error = (decoded(encoding, number, wire, dtype) - values).abs()
    if wire == "bf16":
        bound = 2.0**-8 * values.abs()
    else:
        blocks = torch.nn.functional.pad(values.abs(), (0, -number % 256)).view(-1, 256)
        bound = blocks.amax(dim=1).repeat_interleave(256)[:number] / {"int8": 254, "int4": 14}[wire]
    assert bool((error <= bound * (1 + 1e-6)).all())
    assert bool((decoded(encoded(torch.zeros(number), wire), number, wire, dtype) == 0).all())


def mean_of(wire: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Be one worker: its values and the mean of all."""
    import torch.distributed as dist

    values = torch.randn(700, generator=torch.Generator().manual_seed(dist.get_rank()))
    assert dist.group.WORLD is not None
    return values.clone(), Mean(values, wire, dist.group.WORLD).wait()


@pytest.mark.parametrize(("wire", "error"), [("full", 1e-6), ("bf16", 0.02), ("int8", 0.02), ("int4", 0.3)])
def test_all_workers_have_the_same_mean_to_the_last_bit(wire: str, error: float) -> None:
    found = run_workers(3, mean_of, wire)
    expected = sum(values for values, _ in found) / 3
    for _, mean in found:
        assert torch.equal(mean, found[0][1])
        torch.testing.assert_close(mean, expected, rtol=0, atol=error)


def test_the_bytes_of_an_exchange() -> None:
    assert bytes_sent(1024, "full", workers=4) == 2 * 3 * 4096 // 4
    assert bytes_sent(1024, "bf16", workers=4) == 3 * 2048
    assert bytes_sent(1024, "int8", workers=4) == 3 * (1024 + 16)
    assert bytes_sent(1024, "int4", workers=4) == 3 * (512 + 16)


def test_a_run_says_what_the_differences_of_each_fragment_cost() -> None:
    """Of two workers, an all-reduce in fp32 sends each number once."""
    run = tiny_run({"parallel.layout": "diloco2", "parallel.diloco.every": 6, "parallel.diloco.fragments": 3})
    model = build_model(run)
    of, expected = fragments_of(model.plan, model.placements, 3), [0, 0, 0]
    for name, parameter in model.parameters().items():
        expected[of[name]] += 4 * parameter.numel()
    (sent,) = (traffic for _, traffic in run.hooks.each("sends", run=run, model=model))
    assert [(one.num_bytes, one.every) for one in sent] == [(number, 6) for number in expected]


# Placements.


@pytest.mark.parametrize("layout", ["diloco2dp2tp2", "diloco2zero2pp2", "diloco2fsdp2"])
def test_copies_and_sums_stay_within_a_worker(layout: str) -> None:
    run = tiny_run({"parallel.layout": layout, "model.num_layers": 4})
    model, size = build_model(run), run.mesh.world_size
    each = size // run.mesh.worker(0)[1]
    assert [run.mesh.worker(rank)[0] for rank in range(size)] == [rank // each for rank in range(size)]
    assert run.mesh.batch_shard(size - 1)[0] == run.mesh.batch_shard(0)[1] - 1
    for rank in range(size):
        worker = set(range(rank // each * each, (rank // each + 1) * each))
        assert set(run.mesh.within_worker.of(rank)) == worker
        for placement in model.placements.values():
            assert set(placement.sharing(2).of(rank)) <= worker
            for box in placement.boxes(rank):
                assert set(box.copies) | set(box.partial) <= worker
    assert all("diloco" not in one.partial_axes for one in model.placements.values())


# One worker, memory and refusals.


def test_one_worker_changes_no_bit() -> None:
    alone, plain = (train_steps({"parallel.layout": layout}) for layout in ("diloco1", ""))
    assert (alone.losses, alone.norms, alone.val_loss) == (plain.losses, plain.norms, plain.val_loss)
    assert not isinstance(build(tiny_run({"parallel.layout": "diloco1"})).optimizer, OuterOptimizer)


def test_explain_counts_the_global_weights_and_the_outer_momentum() -> None:
    states = [
        measure_bytes(run := tiny_run({"parallel.layout": layout}), build_model(run))["optimizer state"]
        for layout in ("dp2", "diloco2")
    ]
    elements = sum(one.numel for one in build_model(tiny_run({})).placements.values())
    assert states[1] - states[0] == 2 * 4 * elements


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"parallel.balance": True}, ["parallel.balance=true", "weights differ"]),
        ({"optimizer.average": {"decay": 0.9}}, ["optimizer.average", "global ones"]),
        ({"optimizer.offload": {"chunk": 1000}}, ["optimizer.offload"]),
    ],
)
def test_settings_that_assume_one_model_are_refused(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        build_model(tiny_run({"parallel.layout": "diloco2", **settings}))
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": 10, "fragments": 3}, "fragments=3 does not divide every=10"),
        ({"every": 10, "fragments": 2, "delay": 5}, "delay=5 must be less than every / fragments = 5"),
        ({"wire": "fp8"}, "wire"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tiny_config({"parallel.layout": "diloco2", "parallel.diloco": settings})


def test_an_optimizer_that_keeps_averages_is_refused_before_launch() -> None:
    settings = {"parallel.layout": "diloco2", "optimizer.name": "schedulefree", "schedule.name": "constant"}
    with pytest.raises(UsageError, match="keeps averages of the local weights"):
        refuse_unsavable_states(run := tiny_run(settings), build_model(run))


def test_a_graph_replays_no_exchange() -> None:
    for layout, answer in (("diloco1", True), ("diloco2", "exchanges differences at some steps only")):
        run = tiny_run({"parallel.layout": layout})
        assert dict(run.hooks.each("captures", run=run, model=build_model(run)))["parallel/diloco"] == answer
