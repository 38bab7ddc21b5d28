"""A unit's call between gathering and freeing its weights: what it gets, and when its gradients are summed."""

from typing import Any, cast

import pytest
import torch
from mplug_fsdp.gathered import Gathered
from mplug_fsdp.units import Schedule
from torch import Tensor


class Noted:
    """In the place of the gathered parameters of a unit: notes what is called."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes, self.collects = name, notes, False

    def gather(self) -> None:
        self.notes.append(f"gather {self.name}")

    def wait(self) -> None:
        self.notes.append(f"wait {self.name}")

    def free(self) -> None:
        self.notes.append(f"free {self.name}")

    def collect(self) -> None:
        self.collects = True

    def sum(self) -> None:
        self.collects = False
        self.notes.append(f"sum {self.name}")

    def release(self) -> None:
        self.notes.append(f"release {self.name}")


def schedule_of(*names: str, ahead: int = 0, last: int | None = None) -> tuple[Schedule, list[str]]:
    notes: list[str] = []
    units = [cast(Gathered, Noted(name, notes)) for name in names]
    return Schedule(units, ahead, True, last), notes


def test_a_unit_gets_positional_and_named_arguments_as_they_were_given() -> None:
    schedule, _ = schedule_of("a")

    def inner(*positional: Any, **named: Any) -> Any:
        return positional, named

    x, y, z = (torch.full((2,), float(n), requires_grad=True) for n in range(3))
    (one, two), named = schedule.around(inner, 0)(x, 7, third=y, fourth="text", fifth=z)
    assert (two, named["fourth"], [*named]) == (7, "text", ["third", "fourth", "fifth"])
    for found, given in ((one, x), (named["third"], y), (named["fifth"], z)):
        assert torch.equal(found, given)
        assert found.requires_grad


def test_gradients_reach_the_argument_that_they_belong_to_and_are_summed_after_the_unit() -> None:
    """Two units of two tensors each: the second calls the first's outputs; worked out by hand."""
    schedule, notes = schedule_of("a", "b", last=1)
    first = schedule.around(lambda x, y: (2 * x, 3 * y), 0)
    second = schedule.around(lambda x, y: 5 * x + 7 * y, 1)
    x, y = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    output: Tensor = second(*first(x, y))
    assert output.tolist() == [31.0, 31.0]
    assert notes == ["gather a", "wait a", "free a", "gather b", "wait b"]
    notes.clear()
    output.sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert (x.grad.tolist(), y.grad.tolist()) == ([10.0, 10.0], [21.0, 21.0])
    done = [note for note in notes if not note.startswith(("gather", "wait"))]
    assert done == ["free b", "sum b", "free a", "sum a", "release b", "release a"]
    assert notes.index("wait b") < notes.index("free b") < notes.index("wait a")


def test_the_next_units_are_gathered_ahead_in_both_passes() -> None:
    schedule, notes = schedule_of("a", "b", "c", ahead=1, last=2)
    calls = [schedule.around(lambda x: 2 * x, number) for number in range(3)]
    x = torch.ones(2, requires_grad=True)
    for call in calls:
        x = call(x)
    forward = [note for note in notes if not note.startswith("wait")]
    assert forward == ["gather a", "gather b", "free a", "gather b", "gather c", "free b", "gather c"]
    notes.clear()
    x.sum().backward()
    backward = [note for note in notes if not note.startswith("wait")]
    assert backward == [
        *("gather c", "gather b", "free c", "sum c"),
        *("gather b", "gather a", "free b", "sum b"),
        *("gather a", "release c", "free a", "sum a"),  # one sum beside the new gradients may be in flight
        *("release b", "release a"),
    ]


def test_of_sums_in_flight_the_oldest_is_released_first_and_one_may_remain() -> None:
    schedule, notes = schedule_of("a", "b", "c")
    for unit in schedule.units:
        unit.collect()
        schedule._sum(unit)
    schedule._settle(1)
    assert notes[3:] == ["release a", "release b"]


def test_held_units_are_whole_in_the_block_and_freed_after_it_also_when_one_cannot_be_gathered() -> None:
    schedule, notes = schedule_of("a", "b")
    call = schedule.around(lambda x: 2 * x, 0)
    with torch.no_grad(), schedule.held():
        call(torch.ones(2))
        assert not [note for note in notes if note.startswith("free")]
    assert notes[-2:] == ["free a", "free b"]

    def fails() -> None:
        raise torch.OutOfMemoryError("no memory")

    schedule.units[1].gather = fails  # type: ignore[method-assign]
    notes.clear()
    with pytest.raises(torch.OutOfMemoryError), schedule.held():
        raise AssertionError("the block is not entered")
    assert notes == ["gather a", "free a", "free b"]
    with torch.no_grad():
        call(torch.ones(2))
    assert notes[-1] == "free a"
