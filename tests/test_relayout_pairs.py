"""The features of the pairs under a live change of the layout: the second step is that of one process in fp64.

A case trains a step under its layout, moves to data parallelism alone as a resume of the case does, and trains another.
"""

import json
from pathlib import Path

import pytest
from pair_features import few_with_every_value, named_cases, reference_of, resumed_settings, settings_of, workers_of
from pair_probe import refusal_of, world_size_of
from pair_runs import Trace, errors_of_workers, failures, follow_workers, worst
from relayout_runs import run_live

from mplug_testing import run_workers

DATA = json.loads((Path(__file__).parent / "data" / "pairs.json").read_text())
NAMED = named_cases(DATA)
FEW = sorted(few_with_every_value(NAMED))
"""In these cases, every value of every feature occurs."""
CASES = {name: {**NAMED[name], "resume": "as dp"} for name in dict.fromkeys([*FEW, *sorted(NAMED)[::10]])}
REFERENCES: dict[str, list[Trace]] = {}


def reference(case: dict[str, str], factory: pytest.TempPathFactory) -> list[Trace]:
    settings = reference_of(case)
    key = json.dumps(settings, sort_keys=True)
    if key not in REFERENCES:
        REFERENCES[key] = follow_workers(workers_of(case), settings, factory.mktemp("reference"))
    return REFERENCES[key]


@pytest.mark.wide("relayout")
@pytest.mark.parametrize("name", CASES)
def test_a_case_that_moves_to_data_parallelism_between_two_steps_gives_the_steps_of_one_process(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = CASES[name]
    if reason := refusal_of(case):
        pytest.skip(f"cannot resume as dp: {reason}")
    ranks = world_size_of(case)
    expected = reference(case, tmp_path_factory)
    traces = run_workers(ranks, run_live, settings_of(case), resumed_settings(case, ranks), str(tmp_path), timeout=240)
    assert failures(worst(errors_of_workers(traces, expected))) == []
