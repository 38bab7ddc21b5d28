"""Buckets: what is in them, when they leave, and that their sums are those of the whole batch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mplug_dp import DataParallel
from mplug_dp.buckets import Bucket, reduce_in_buckets
from torch import Tensor, nn

from mplug import Sinks
from mplug_nn import Linear
from mplug_testing import run_workers

D, DEPTH = 8, 5
LAYER_BYTES = D * D * 4
GROUP: Any = object()
"""Stands for a process group where nothing is sent."""


class Chain(nn.Module):
    """Linears one after the other, of one weight each."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(D, D, bias=False) for _ in range(depth))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)

    def forward(self, x: Tensor, events: list[str] | None = None) -> Tensor:
        for number, layer in enumerate(self.layers):
            if events is not None:
                x.register_hook(lambda _, number=number: events.append(f"gradient reaches the input of {number}"))
            x = layer(x).tanh()
        return x


class Traffic:
    """What would be sent, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.numbers: dict[int, int] = {}

    def expect(self, buckets: list[Bucket]) -> None:
        self.numbers = {bucket.gradients.data_ptr(): number for number, bucket in enumerate(buckets)}

    def all_reduce(self, tensor: Tensor, group: object, async_op: bool) -> SimpleNamespace:
        assert group is GROUP
        assert async_op
        number = self.numbers[tensor.data_ptr()]
        self.events.append(f"launch {number}")
        return SimpleNamespace(wait=lambda: self.events.append(f"wait {number}"))


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    recorded = Traffic()
    monkeypatch.setattr(dist, "all_reduce", recorded.all_reduce)
    return recorded


def listening(module: nn.Module, bucket_bytes: int, traffic: Traffic) -> tuple[Sinks, list[Bucket]]:
    sinks = Sinks(dict(module.named_parameters()))
    buckets = reduce_in_buckets(sinks, dict.fromkeys(sinks, GROUP), bucket_bytes)
    traffic.expect(buckets)
    return sinks, buckets


def inputs(number: int = 0) -> Tensor:
    return torch.randn(3, D, generator=torch.Generator().manual_seed(number))


# What is in a bucket.


@pytest.mark.parametrize("layers_each", [1, 2, 3, DEPTH, 99])
def test_buckets_are_the_arena_cut_in_its_order(layers_each: int, traffic: Traffic) -> None:
    sinks, buckets = listening(Chain(), layers_each * LAYER_BYTES, traffic)
    start = sinks.arena.data_ptr()
    for bucket in buckets:
        assert bucket.gradients.data_ptr() == start
        assert bucket.gradients.is_contiguous()
        start += bucket.gradients.nbytes
    assert start == sinks.arena.data_ptr() + sinks.arena.nbytes
    assert len(buckets) == -(-DEPTH // layers_each)


def lies_in(sinks: Sinks, name: str, bucket: Bucket) -> bool:
    start, address = bucket.gradients.data_ptr(), sinks[name].buffer.data_ptr()
    return start <= address < start + bucket.gradients.nbytes


@pytest.mark.parametrize(("bucket_mib", "number"), [(LAYER_BYTES / 2**20, 5), (2 * LAYER_BYTES / 2**20, 3), (32, 1)])
def test_the_size_of_a_bucket_is_configured_in_mib(
    bucket_mib: float, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    monkeypatch.setattr(
        dist, "all_reduce", lambda tensor, **_: launched.append(tensor) or SimpleNamespace(wait=lambda: None)
    )
    chain = Chain()
    sinks = wrapped(chain, GROUP, ("dp",), bucket_mib)
    step(sinks, chain, 1)
    assert len(launched) == number


def wrapped(chain: Chain, group: Any, axes: tuple[str, ...], bucket_mib: float = 32, taken: str = "") -> Sinks:
    """The sinks of a model all of whose gradients are data-parallel over some axes, after the plugin has seen them."""
    sinks = Sinks(dict(chain.named_parameters()))
    sinks.reduced_over |= {taken} - {""}
    placements = dict.fromkeys(sinks, SimpleNamespace(data_axes=axes, parameter=SimpleNamespace(trainable=True)))
    groups = dict.fromkeys(sinks, group)
    model = SimpleNamespace(sinks=sinks, placements=placements, data_groups=lambda _: groups)
    DataParallel(DataParallel.Config(bucket_mib=bucket_mib)).wrap_model(run=None, model=model)
    return sinks


def is_listened_to(sinks: Sinks) -> bool:
    return bool(sinks.when_finished) or any(sink.listeners for sink in sinks.values())


def test_what_it_sums_over_is_on_record_and_what_another_strategy_sums_is_left_to_it() -> None:
    own, others = wrapped(Chain(), GROUP, ("dp", "acme")), wrapped(Chain(), GROUP, ("acme",), taken="acme")
    assert (own.reduced_over, is_listened_to(own)) == ({"dp", "acme"}, True)
    assert (others.reduced_over, is_listened_to(others)) == ({"acme"}, False)


# Several groups.

OTHERS: Any = object()
"""Stands for another one."""


@pytest.mark.parametrize("bucket_bytes", [1, LAYER_BYTES, 2 * LAYER_BYTES, 10**9])
def test_a_bucket_holds_gradients_of_one_group_alone_and_all_are_in_one(
    bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[set[str]] = []
    families = {f"layers.{n}.weight": ("sparse_data",) if n % 2 else ("dp",) for n in range(DEPTH)}
    sinks = Sinks(dict(Chain().named_parameters()), families)
    groups = {name: OTHERS if axes == ("sparse_data",) else GROUP for name, axes in families.items()}

    def all_reduce(tensor: Tensor, group: Any, async_op: bool) -> SimpleNamespace:
        assert async_op
        held = {name for name in sinks if lies_in(sinks, name, Bucket(tensor, group, 0, 0, 0))}
        assert {groups[name] for name in held} == {group}
        sent.append(held)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    buckets = reduce_in_buckets(sinks, groups, bucket_bytes)
    sinks.begin_step()
    final = set()
    for name in reversed(list(sinks)):  # as backward ends them
        sinks[name].finish()
        final.add(name)
        ready = [held for bucket in buckets if (held := {n for n in sinks if lies_in(sinks, n, bucket)}) <= final]
        assert sent == ready  # none waits for one that ends later
    assert sorted(name for held in sent for name in held) == sorted(sinks)


# When a bucket leaves.


def step(sinks: Sinks, module: nn.Module, number: int, events: list[str] | None = None) -> None:
    sinks.begin_step()
    for micro_batch in range(number):
        if micro_batch == number - 1:
            sinks.expect_last()
        x = inputs(micro_batch).requires_grad_() * 1  # no leaf: leaves get their gradients out of turn
        output = module(x) if events is None else module(x, events)
        output.sum().backward()
        if events is not None:
            events.append(f"backward {micro_batch} ends")
    sinks.finish()


def test_every_bucket_leaves_as_soon_as_backward_has_passed_its_layers(traffic: Traffic) -> None:
    chain = Chain()
    sinks, _ = listening(chain, LAYER_BYTES, traffic)
    step(sinks, chain, 1, traffic.events)
    wanted = []
    for layer in reversed(range(DEPTH)):
        wanted += [f"launch {DEPTH - 1 - layer}", f"gradient reaches the input of {layer}"]
    assert traffic.events == [*wanted, "backward 0 ends", *(f"wait {number}" for number in range(DEPTH))]


class Idle(Chain):
    """One more weight, in the middle of the arena, which takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].idle = nn.Parameter(torch.zeros(D))


@pytest.mark.parametrize(("make", "layers_each"), [(Chain, 2), (Idle, 1), (Idle, 2)])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_each_bucket_leaves_once_a_step_and_in_the_last_backward_pass(
    make: type[Chain], layers_each: int, number: int, traffic: Traffic
) -> None:
    """Also one with a weight that takes no part; it waits for the end of the step."""
    net = make()
    sinks, buckets = listening(net, layers_each * LAYER_BYTES, traffic)
    for _ in range(3):
        traffic.events.clear()
        step(sinks, net, number, traffic.events)
        launches = [event for event in traffic.events if event.startswith("launch")]
        expected = [f"launch {n}" for n in range(len(buckets))]
        assert (launches if make is Chain else sorted(launches)) == expected
        before_last = traffic.events.index(f"backward {number - 2} ends") if number > 1 else -1
        assert all(traffic.events.index(launch) > before_last for launch in launches)
        assert traffic.events[-len(buckets) :] == [f"wait {n}" for n in range(len(buckets))]


# Sums.


class Fork(nn.Module):
    """Two branches; a rank takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))


def forked() -> dict[str, list[float]]:
    """Gradients where rank 0 goes left and finds a slope of 1, and rank 1 goes right and finds one of 2."""
    fork, rank = Fork(), dist.get_rank()
    sinks = Sinks(dict(fork.named_parameters()))
    reduce_in_buckets(sinks, dict.fromkeys(sinks, dist.group.WORLD), 1)
    sinks.begin_step()
    sinks.expect_last()
    ((rank + 1) * (fork.left, fork.right)[rank]).sum().backward()
    sinks.finish()
    return {name: sink.buffer.tolist() for name, sink in sinks.items()}


def test_ranks_that_use_different_weights_still_sum_the_same_buckets() -> None:
    assert run_workers(2, forked) == [{"left": [1.0] * 4, "right": [2.0] * 4}] * 2
