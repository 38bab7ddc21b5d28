"""Schedules of third parties: found by name, proven before launch, and refused with the faulty action."""

from pathlib import Path

import pytest
from distributions import installed

from mplug import UsageError
from mplug.model.build import build_model
from mplug_schedules import Shape, find_schedule, proven_table
from mplug_testing.harness import tiny_run

SOURCE = '''
from mplug_schedules import Action, Kind, Shape, Table, with_transfers

KINDS = (Kind.FORWARD, Kind.BACKWARD)

def one_by_one(shape: Shape) -> Table:
    """One micro batch after the other, in one chunk per rank, the first rank last."""
    ranks = tuple(reversed(range(shape.num_ranks)))
    rows = (
        tuple(Action(kind, number, chunk) for number in range(shape.num_micro_batches) for kind in KINDS)
        for chunk in ranks
    )
    return with_transfers(tuple(rows), ranks)

def restless(shape):
    table = one_by_one(shape)
    return table if shape.num_micro_batches < 8 else with_transfers(
        tuple(tuple(Action(kind, number, chunk) for number in range(8) for kind in KINDS) for chunk in range(2)), (0, 1)
    )

def forgetful(shape):
    table = one_by_one(shape)
    return Table((table.rows[0][:-1], *table.rows[1:]), table.ranks)

def picky(shape):
    raise ValueError("needs 3 ranks")

def broken(shape):
    return shape.num_stages

def no_table(shape):
    return [()]

NOT_CALLABLE = 3
'''
NAMES = ("one_by_one", "restless", "forgetful", "picky", "broken", "no_table", "NOT_CALLABLE", "absent")


@pytest.fixture(autouse=True)
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{name.lower()} = acme_orders:{name}" for name in NAMES]
    points = "\n".join(["[mplug.schedules]", *lines, "gpipe = acme_orders:picky"])
    monkeypatch.syspath_prepend(installed(tmp_path, "acme-orders", points, SOURCE))


def test_a_third_party_adds_a_schedule_with_its_own_ranks() -> None:
    settings = {"parallel.layout": "pp2", "parallel.pp.schedule": "one_by_one", "trainer.micro_batch_size": 1}
    model = build_model(tiny_run(settings))
    assert model.stages.ranks == (1, 0)
    assert model.own_chunks == (1,)
    assert [unit.name for unit in model.own_units][-1] == "head"


def test_the_tables_of_all_batch_sizes_of_a_ramp_up_are_proven_before_launch() -> None:
    ramp_up = {"schedule.batch_rampup.start": 4, "schedule.batch_rampup.increment": 2, "trainer.micro_batch_size": 1}
    settings = {"parallel.layout": "pp2", "trainer.global_batch_size": 8, **ramp_up}
    assert tiny_run(settings).micro_batch_counts() == (4, 6, 8)
    with pytest.raises(UsageError, match="gives chunks to other ranks if the number of micro batches changes"):
        build_model(tiny_run({**settings, "parallel.pp.schedule": "restless"}))


FAULTY = {
    "forgetful": r"'forgetful' .acme-orders 1.0. returns a faulty table .*: rank 0 lacks SB3 of chunk 1 to rank 1",
    "picky": r"'picky' .* does not serve 2 ranks and 4 micro batches: needs 3 ranks",
    "broken": r"'broken' .* fails in 'acme_orders:broken': AttributeError: .*acme_orders.py:\d+",
    "no_table": r"'no_table' .* returns list; a schedule returns a mplug_schedules.Table",
    "not_callable": r"'acme_orders:NOT_CALLABLE' is not a function",
    "absent": r"'absent' .* cannot be imported: .*absent",
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_schedule_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=FAULTY[name]):
        proven_table(name, Shape(2, 4))


def test_a_name_that_two_distributions_claim_must_be_completed() -> None:
    with pytest.raises(UsageError, match=r"'gpipe' is claimed by acme-orders 1.0 and mplug-pp .*'mplug-pp/gpipe'"):
        find_schedule("gpipe")
    assert len(proven_table("mplug-pp/gpipe", Shape(2, 4)).rows) == 2
