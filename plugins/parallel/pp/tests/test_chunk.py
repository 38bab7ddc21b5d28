"""One chunk of a rank: what it keeps between its passes, what it hands over, and how long it computes."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mplug_pp.busy import Busy
from mplug_pp.chunk import Chunk
from torch import Tensor, nn

from mplug import GradientSink, Stages


class Sinks(dict[str, GradientSink]):
    """Notes the passes that were declared."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = list[tuple[str, ...]]()

    def begin_pass(self, names: tuple[str, ...]) -> None:
        self.passes.append(names)


class Middle:
    """The middle chunk of three: it takes and gives an integer activation beside `hidden`."""

    stages, own_chunks = Stages("pp", (("a",), ("b",), ("c",))), (1,)

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.full((3,), 2.0))

    def crossing(self, chunk: int) -> tuple[str, ...]:
        return ("hidden", "counts") if chunk else ()

    def learning(self, chunk: int) -> frozenset[str]:
        return frozenset(self.crossing(chunk))  # a trained unit returns both

    def trained_in(self, chunk: int) -> tuple[str, ...]:
        return ("weight",)

    def run(self, entries: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = entries["hidden"] * self.weight
        self.made = weakref.ref(hidden)
        return {**entries, "hidden": hidden, "counts": entries["counts"] + 1}


def chunk_of(model: Any) -> tuple[Chunk, Sinks]:
    default: Any = SimpleNamespace(sinks=Sinks(), loss_gradient=lambda _: None)
    return Chunk(model, default, 1), default.sinks


def test_an_integer_that_a_trained_unit_returns_crosses_without_a_gradient() -> None:
    model = Middle()
    chunk, sinks = chunk_of(model)
    outputs = chunk.forward(0, {}, [torch.ones(3), torch.tensor([4])], split=False)
    assert outputs["counts"].tolist() == [5]
    assert chunk.gradients_of(0) == [(torch.float32, (3,))]
    (gradient,) = chunk.backward(0, [torch.full((3,), 10.0)])
    assert gradient.tolist() == [20, 20, 20]
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [10, 10, 10]
    assert sinks.passes == [("weight",)]


class Two(Middle):
    """Takes and gives two activations; a third, `fixed`, depends on no trained parameter."""

    def crossing(self, chunk: int) -> tuple[str, ...]:
        return ("fixed", "left", "right") if chunk else ()

    def learning(self, chunk: int) -> frozenset[str]:
        return frozenset({"left", "right"})

    def run(self, entries: dict[str, Tensor]) -> dict[str, Tensor]:
        assert [entries[name].requires_grad for name in self.crossing(1)] == [False, True, True]
        return {**entries, "left": 3 * entries["left"], "right": 5 * entries["right"] + entries["fixed"]}


def test_every_activation_gets_its_own_gradient_and_a_fixed_one_gets_none() -> None:
    chunk, _ = chunk_of(Two())
    outputs = chunk.forward(0, {}, [torch.ones(2), torch.ones(2), torch.ones(3)[:2]], split=False)
    assert {name: one.tolist() for name, one in outputs.items()} == {"fixed": [1, 1], "left": [3, 3], "right": [6, 6]}
    left, right = chunk.backward(0, [torch.full((2,), 1.0), torch.full((2,), 10.0)])
    assert (left.tolist(), right.tolist()) == ([3, 3], [50, 50])


def test_an_output_is_not_kept_for_the_backward_pass() -> None:
    """Its backward pass starts from the graph, so the memory of the output is free as soon as it has been sent."""
    model = Middle()
    chunk, _ = chunk_of(model)
    chunk.forward(0, {}, [torch.ones(3), torch.tensor([4])], split=False)
    assert model.made() is None
    assert len(chunk.backward(0, [torch.ones(3)])) == 1


def test_the_bubble_is_the_idle_share_between_the_first_and_the_last_computation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([1.0, 3.0, 5.0, 9.0, 9.0, 11.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    busy = Busy("cpu")
    for _ in range(3):
        with busy.computing():
            pass
    measured = busy.measured()
    busy.begin()
    assert measured() == {"bubble": pytest.approx(1 - 8 / 10)}
