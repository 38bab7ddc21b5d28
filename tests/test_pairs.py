"""Features in pairs: every pair of values that mplug accepts occurs in a run that equals one process in fp64.

`python docs/pairs.py` generates the cases (`tests/data/pairs.json`) and writes docs/pairs.md. The quick tests run
six uncompiled cases; the wide set `pairs` runs the rest. With MPLUG_PAIRS=FILE
each case appends a line of JSON with its largest errors to the file.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from covering import Case, Features, Generator, all_pairs, default_case, pairs_of
from pair_deaths import healed, on_disks
from pair_features import (
    ARRAYS,
    FEATURES,
    HEALED,
    PRODUCT,
    QUICK,
    named_cases,
    reference_of,
    resumed_settings,
    settings_of,
    workers_of,
)
from pair_probe import refusal_of, world_size_of
from pair_runs import Trace, checkpoint_of, errors_of_workers, failures, follow_workers, run_case, worst

from mplug.errors import RunError
from mplug_testing import run_workers
from mplug_testing.workers import WorkerFailed

DOCS = Path(__file__).parent.parent / "docs"
DATA: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "pairs.json").read_text())
LISTS = {
    "all families": (FEATURES, "pairs", "refused"),
    **{name: (array.features, name, f"{name} refused") for name, array in ARRAYS.items()},
}
"""The features of an array, and the keys of its cases and of what is refused."""
CASES = named_cases(DATA)
RESULTS = os.environ.get("MPLUG_PAIRS")

REFERENCES: dict[str, tuple[list[Trace], Path]] = {}


def reference(case: Case, factory: pytest.TempPathFactory) -> tuple[list[Trace], Path]:
    """The run of one process for each worker, and its checkpoint after the first step.

    Cases of the same mathematics share it.
    """
    settings = reference_of(case)
    key = json.dumps(settings, sort_keys=True)
    if key not in REFERENCES:
        folder = factory.mktemp("reference")
        REFERENCES[key] = follow_workers(workers_of(case), settings, folder), checkpoint_of(folder)
    return REFERENCES[key]


def shown(case: Case) -> dict[str, str]:
    """The values of a case that are not defaults."""
    defaults = default_case(
        {**{name: values for one in ARRAYS.values() for name, values in one.features.items()}, **FEATURES}
    )
    return {name: value for name, value in case.items() if value != defaults[name]}


Found = dict[str, Any]


def found_in(case: Case, factory: pytest.TempPathFactory, folder: Path) -> Found:
    """Run a case; returns the largest error of each kind of figure, the failures, and the seconds."""
    expected, checkpoint = reference(case, factory)
    world_size, given = world_size_of(case), None
    if case["resume"] in HEALED:
        return healed_in(case, expected, folder)
    if case["resume"] == "from one process":
        given = str(checkpoint)
    runs = settings_of(case), resumed_settings(case, world_size)
    began = time.monotonic()
    try:
        ranks = run_workers(world_size, run_case, *runs, str(folder), given, timeout=240)
    except (WorkerFailed, TimeoutError) as error:
        return {"ranks": world_size, "failures": [str(error)], "errors": {}}
    largest: dict[str, float] = {}
    sentences: list[str] = []
    for number, name in enumerate(("", "resumed: ")):
        found = worst(errors_of_workers([rank[number] for rank in ranks], expected))
        largest |= {name + kind: error for kind, (error, _) in found.items()}
        sentences += [name + sentence for sentence in failures(found)]
    seconds = {"seconds": round(time.monotonic() - began, 2), "cpu": round(sum(rank[2] for rank in ranks), 2)}
    return {"ranks": world_size, **seconds, "failures": sentences, "errors": largest}


def healed_in(case: Case, expected: list[Trace], folder: Path, more: Mapping[str, Any] = MappingProxyType({})) -> Found:
    """Run a case in which a rank dies, with `more` settings; the figures are those of `found_in`."""
    began = time.monotonic()
    try:
        traces = healed({**settings_of(case), **more}, folder)
    except RunError as error:
        return {"ranks": world_size_of(case), "failures": [str(error)], "errors": {}}
    found = worst(errors_of_workers(traces, expected))
    largest = {f"healed: {kind}": error for kind, (error, _) in found.items()}
    seconds = round(time.monotonic() - began, 2)
    return {"ranks": len(traces), "seconds": seconds, "failures": failures(found), "errors": largest}


def recorded(name: str, case: Case, found: dict[str, Any]) -> None:
    """Append the result of a case to the file of results, if there is one."""
    if RESULTS:
        line = json.dumps({"case": name, "values": shown(case), **found})
        with Path(RESULTS).open("a") as file:
            file.write(f"{line}\n")


MARKED = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.wide("pairs")) for name in CASES]


@pytest.mark.parametrize("name", MARKED)
def test_the_features_of_a_case_give_the_run_of_one_process_and_resume_as_it(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = found_in(CASES[name], tmp_path_factory, tmp_path)
    recorded(name, CASES[name], found)
    assert not found["failures"], f"{shown(CASES[name])}: {'; '.join(found['failures'])}"


@pytest.mark.wide("disks")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["resume"] in HEALED])
def test_the_features_of_a_case_go_on_from_the_disk_of_one_machine_when_the_other_is_lost(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The cases in which a rank dies have all pairs of a death and another value."""
    expected, _ = reference(CASES[name], tmp_path_factory)
    found = healed_in(CASES[name], expected, tmp_path, on_disks(tmp_path))
    recorded(f"{name} from disks", CASES[name], found)
    assert not found["failures"], f"{shown(CASES[name])}: {'; '.join(found['failures'])}"


@pytest.mark.parametrize(("features", "cases", "entries"), LISTS.values(), ids=LISTS)
def test_every_pair_of_values_is_in_a_case_or_is_refused(features: Features, cases: str, entries: str) -> None:
    """A refused set of more than two values leaves its pairs to other cases."""
    covered = {pair for case in DATA[cases] for pair in pairs_of(case)}
    refused = [frozenset(entry["values"].items()) for entry in DATA[entries]]
    missing = [
        sorted(pair) for pair in all_pairs(features) if pair not in covered and not any(one <= pair for one in refused)
    ]
    assert missing == []


def test_the_product_has_every_combination_of_its_values() -> None:
    wanted = 1
    for name in PRODUCT:
        wanted *= len(PRODUCT[name])
    assert len({tuple(case[name] for name in PRODUCT) for case in DATA["product"]}) == wanted


@pytest.mark.wide("pairs")
def test_what_the_page_lists_as_refused_is_refused() -> None:
    for entry in DATA["refused"]:
        assert refusal_of({**default_case(FEATURES), **entry["values"]}) == entry["reason"]
    for name, array in ARRAYS.items():
        for entry in DATA[f"{name} refused"]:
            assert refusal_of(array.whole(entry["values"])) == entry["reason"]


@pytest.mark.wide("pairs")
def test_no_case_is_refused() -> None:
    assert [name for name, case in CASES.items() if refusal_of(case)] == []


def test_the_page_is_that_of_the_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    pairs = importlib.import_module("pairs")
    assert (DOCS / "pairs.md").read_text() == pairs.page(DATA)
    sys.modules.pop("pairs")


# The generator, on features whose answers are known.

SMALL = {"a": ("1", "2", "3"), "b": ("1", "2"), "c": ("1", "2"), "d": ("1", "2", "3")}


def accepting(_: Case) -> str:
    return ""


def every_size(_: Case) -> bool:
    return True


def refusing(case: Case) -> str:
    """Refuses a pair, and a set of three values."""
    if case["a"] == "2" and case["d"] == "3":
        return "a 2 and d 3"
    return "a 3, b 2 and c 2" if (case["a"], case["b"], case["c"]) == ("3", "2", "2") else ""


def test_the_generator_covers_every_pair_that_is_not_refused_and_finds_the_smallest_refused_sets() -> None:
    array = Generator(SMALL, refusing, every_size).make()
    pair, triple = frozenset({("a", "2"), ("d", "3")}), frozenset({("a", "3"), ("b", "2"), ("c", "2")})
    assert array.uncovered == []
    assert pair in array.refused
    assert set(array.refused) <= {pair, triple}
    assert {one for case in array.cases for one in pairs_of(case)} == set(all_pairs(SMALL)) - {pair}
    assert not any(map(refusing, array.cases))
    assert len(array.cases) < 18, "half of all combinations"


def test_cases_that_are_kept_stay_first_unless_they_are_refused_now() -> None:
    before = Generator(SMALL, accepting, every_size).make().cases
    after = Generator(SMALL, refusing, every_size).make(before)
    fitting = [case for case in before if not refusing(case)]
    assert after.cases[: len(fitting)] == fitting
    assert len(fitting) < len(before)


def test_a_pair_that_no_allowed_case_contains_is_reported() -> None:
    array = Generator(SMALL, accepting, lambda case: case.get("a") != "3" or case.get("b") != "2").make()
    assert array.uncovered == [frozenset({("a", "3"), ("b", "2")})]
