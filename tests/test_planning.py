"""Planning one rank asks about no other rank, however many there are."""

from dataclasses import replace
from typing import Any, cast

import pytest

from mplug.layout.mesh import Mesh
from mplug.layout.ranks import Grouping, Ranks
from mplug.model.build import build_model
from mplug.run.prepare import prepare
from mplug_steps.reduction import Reduction
from mplug_testing.harness import tiny_config


class NamedGroups:
    """Names process groups, and creates none."""

    def of(self, grouping: Grouping, use: str = "") -> None:
        assert grouping.size > 1


def questions(layout: str, model: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often planning rank 1 of a layout asks for the place or the group of a rank."""
    settings = {"model.name": model, "parallel.layout": layout, "trainer.global_batch_size": 1 << 14}
    run = prepare(tiny_config({**settings, "trainer.micro_batch_size": 1}))
    counts = {"coordinates": 0, "of": 0, "__iter__": 0}

    def counted(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def asked(*arguments: Any) -> Any:
            counts[name] += 1
            return original(*arguments)

        monkeypatch.setattr(kind, name, asked)

    counted(Mesh, "coordinates")
    counted(Grouping, "of")
    counted(Ranks, "__iter__")
    run = replace(run, rank=1)
    built = build_model(run)
    placements = dict(built.placements)
    if built.sharding is not None:
        placements |= {name: built.sharding.placed(placements[name]) for name in built.sharding.of}
    assert any(placement.boxes(run.rank) for placement in placements.values())
    run.groups = cast(Any, NamedGroups())
    Reduction(run, built.placements, (), [])
    monkeypatch.undo()
    return counts


@pytest.mark.parametrize(
    ("model", "layout"),
    [("gpt", "tp2pp2dp{}"), ("gpt", "tp2pp2zero{}"), ("gpt", "tp2pp2fsdp{}"), ("mixtral", "ep2pp2dp{}")],
)
@pytest.mark.wide("layouts", quick=["gpt-tp2pp2dp{}"])
def test_a_thousand_times_more_ranks_are_not_a_reason_to_ask_twice_as_much(
    model: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (questions(layout.format(degree), model, monkeypatch) for degree in (4, 4096))
    assert {name: count for name, count in many.items() if count > 2 * few[name]} == {}
    assert few["__iter__"] == 0
    assert few["of"] > 0
