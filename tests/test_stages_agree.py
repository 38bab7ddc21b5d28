"""Every rank computes the stages and the table of actions itself; ranks with different ones are refused."""

from typing import Any

import pytest

from mplug import Run, UsageError
from mplug.training.assembly import build
from mplug_testing.harness import tiny_run

PIPELINE: dict[str, Any] = {"parallel.layout": "pp2", "model.num_layers": 2, "trainer.micro_batch_size": 2}


class Gathered(Exception):
    """Ends the build when ranks would compare their stages."""


def statement(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """What a rank of a run would compare with the others."""

    def gathered(run: Run, value: Any) -> list[Any]:
        raise Gathered(value)

    monkeypatch.setattr(Run, "gathered", gathered)
    with pytest.raises(Gathered) as caught:
        build(tiny_run({**PIPELINE, **{f"parallel.pp.{name}": value for name, value in changes.items()}}))
    return caught.value.args[0]


def test_ranks_with_another_order_of_actions_or_other_units_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """1F1B and GPipe differ in the order of actions alone."""
    own, other, third = (statement(monkeypatch, **one) for one in ({}, {"schedule": "gpipe"}, {"split": [1, 3]}))
    assert len({own, other, third}) == 3
    monkeypatch.setattr(Run, "gathered", lambda _, value: [value, other])
    with pytest.raises(UsageError, match="parallel/pp, or its schedule '1f1b', gives rank 1 other stages or anoth"):
        build(tiny_run(PIPELINE))
