"""Mutants of what ranks exchange: made from the code, under names that last, and killed by the recorded tests."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FAULTS = ROOT / "benchmarks" / "faults"
RECORDS = [json.loads(line) for line in (FAULTS / "killers.jsonl").read_text().splitlines()]
NAMES = sorted((record["how"] == "time-out", record["mutant"]) for record in RECORDS if record["how"] != "survives")
"""Whether a test must hang to kill a mutant, and the mutant's name: those that take long come last."""
SMALL = 2
"""Number of mutants that the quick tests plant, of as many operators."""
CURRENT = 0.9
"""The part of the records that must name a mutant and a test that exist."""
RECORDED = 0.5
"""The part of the mutants that must have a record: others were not tried yet, or are of new code."""
SOURCE = '''
"""A file."""
import torch
import torch.distributed as dist


def summed(x, group):
    """The sum of the ranks' x, divided by their number."""
    dist.all_reduce(x, group=group)
    return x / group.size()


def ring(x, group, rank):
    if rank < group.size():
        raise ValueError(f"rank {rank + 1}")
    return torch.cat([x[rank], x[(rank - 1) % group.size()]])


class Doubled(torch.autograd.Function):
    @staticmethod
    def backward(ctx, grad):
        return summed(grad, ctx.group), None
'''
WORLD = "__import__('torch').distributed.group.WORLD"
EXPECTED = {
    ("summed", "remove-collective", 0): "dist.all_reduce(x, group=group) -> None",
    ("summed", "replace-group", 0): f"group -> {WORLD}",
    ("summed", "reduction", 0): "dist.all_reduce(x, group=group) -> "
    "dist.all_reduce(x, group=group, op=__import__('torch').distributed.ReduceOp.MAX)",
    ("summed", "drop-scale", 0): "x / group.size() -> x",
    ("ring", "shift-index", 0): "rank < group.size() -> (rank <= group.size())",
    ("ring", "reverse-order", 0): "[x[rank], x[(rank - 1) % group.size()]] -> "
    "list([x[rank], x[(rank - 1) % group.size()]])[::-1]",
    ("ring", "shift-index", 1): "rank -> rank - 1",
    ("ring", "shift-index", 2): "(rank - 1) % group.size() -> ((rank - 1) % group.size()) - 1",
    ("ring", "shift-index", 3): "(rank - 1) % group.size() -> (rank - 1)",
    ("ring", "shift-index", 4): "rank - 1 -> rank",
    ("Doubled.backward", "backward", 0): "summed(grad, ctx.group) -> grad",
    ("Doubled.backward", "backward", 1): "summed(grad, ctx.group) -> "
    "(lambda x: None if x is None else x * 0)(summed(grad, ctx.group))",
    ("Doubled.backward", "remove-collective", 0): "summed(grad, ctx.group) -> grad",
    ("Doubled.backward", "replace-group", 0): f"ctx.group -> {WORLD}",
}


@pytest.fixture(scope="module")
def records() -> Iterator[ModuleType]:
    """The tool, whose modules import each other by plain names."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FAULTS))
        import records

        yield records
        for name in ("records", "mutants", "operators", "sessions", "slots", "workspace"):
            if name not in before:
                sys.modules.pop(name, None)


def small_tree(folder: Path, source: str) -> Path:
    file = folder / "ops" / "src" / "mplug_ops" / "rows.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    return folder


def test_every_operator_makes_the_mutants_that_are_worked_out_by_hand(records: ModuleType, tmp_path: Path) -> None:
    found = records.mutants_of(small_tree(tmp_path, SOURCE))
    changes = {tuple(mutant.name.split("::")[1:]): mutant.change for mutant in found}
    expected = {(function, operator, str(number)): text for (function, operator, number), text in EXPECTED.items()}
    expected.pop(("Doubled.backward", "remove-collective", "0"))  # the same change as the first of `backward`
    assert changes == expected


def test_a_copy_imports_every_package_of_the_tree_from_itself(records: ModuleType) -> None:
    listed = sys.modules["slots"].sources_of(ROOT)
    found = (path.parent.parent for path in ROOT.glob("[!.]*/**/mplug_*/__init__.py"))
    assert {ROOT, *(folder for folder in found if "tests" not in folder.relative_to(ROOT).parts)} == {*listed}


def test_a_name_outlives_edits_of_other_functions_and_of_the_lines_above(records: ModuleType, tmp_path: Path) -> None:
    edited = SOURCE.replace('"""A file."""', '"""A file.\n\nWith more words.\n"""').replace(
        "rank < group", "rank + 7 < group"
    )
    one, other = (
        records.mutants_of(small_tree(tmp_path / name, text)) for name, text in (("a", SOURCE), ("b", edited))
    )
    before, after = ({mutant.name: mutant.change for mutant in found} for found in (one, other))
    lasting = {name for name in before if "::ring::" not in name}
    assert len(lasting) == 7
    assert {name: after[name] for name in lasting} == {name: before[name] for name in lasting}


def test_mutants_are_python_and_differ_from_the_code(records: ModuleType) -> None:
    mutants = records.mutants_of(ROOT)
    assert len({mutant.name for mutant in mutants}) == len(mutants) >= 500
    for mutant in mutants[::60]:
        source = (ROOT / mutant.file).read_bytes()
        assert compile(mutant.applied(source), mutant.file, "exec") != compile(source, mutant.file, "exec")


def test_of_a_hundred_mutants_that_change_a_result_the_quick_tests_kill_at_least_ninety_nine(
    records: ModuleType,
) -> None:
    """What was measured when the records were made; mutants of code that was edited since have no record."""
    current, stale = records.recorded()
    names = {mutant.name for mutant in records.mutants_of(ROOT)}
    equivalent = records.equivalents()
    alive = records.alive()
    killed = {mutant.name for mutant, _ in current}
    assert not killed & equivalent
    assert len(killed) >= 500
    assert len(killed) >= 0.99 * len(killed | alive)
    assert len(stale) <= (1 - CURRENT) * (len(current) + len(stale)), "make the records again: docs/faults.md says how"
    assert len(killed) >= RECORDED * len(names - equivalent), "make the records again: docs/faults.md says how"


def test_the_recorded_tests_kill_a_sample_of_the_mutants_and_pass_without_one(records: ModuleType) -> None:
    """The mutant that `survives` replaces a name by an equal one, so that its test passes: the tool must say so."""
    current, _ = records.recorded()
    quick = [(mutant, entry) for mutant, entry in current if entry["how"] == "failure" and entry["seconds"] < 2]
    chosen = records.sample(quick, SMALL)
    assert len({mutant.operator for mutant, _ in chosen}) == SMALL
    mutant, entry = next(one for one in chosen if one[0].operator in ("shift-index", "drop-scale", "replace-group"))
    survives = records.Mutant("survives", mutant.file, mutant.start, mutant.stop, mutant.old, f"({mutant.old})", ())
    found = records.verdicts([*chosen, (survives, entry)], sys.executable, 1)
    assert found.pop("survives") == records.SURVIVES
    assert [*found.values()].count(records.KILLED) > SMALL // 2
    assert records.SURVIVES not in found.values()


@pytest.fixture(scope="module")
def current(records: ModuleType) -> dict[str, Any]:
    """The recorded mutants that the code has, with their records."""
    return {mutant.name: (mutant, entry) for mutant, entry in records.recorded()[0]}


@pytest.fixture(scope="module")
def slot(records: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A copy of the tree, for all mutants that this process plants."""
    made = records.Slot(ROOT, tmp_path_factory.mktemp("mutants") / "slot")
    yield made
    made.close()


@pytest.mark.wide("mutants")
@pytest.mark.parametrize("name", [name for _, name in NAMES])
def test_the_recorded_test_kills_the_mutant(
    name: str, records: ModuleType, current: dict[str, Any], slot: Any, record_property: Callable[[str, str], None]
) -> None:
    """Mutants and tests that are gone are skipped; other tests limit their number."""
    if name not in current:
        pytest.skip("the code has changed since")
    found = records.verdict(slot, current[name])
    record_property("verdict", found)
    if found == records.MISSING:
        pytest.skip(found)
    assert found in (records.KILLED, records.BY_WIDE), current[name][0].change


@pytest.mark.wide("mutants")
def test_every_mutant_is_python(records: ModuleType) -> None:
    found = Counter[str]()
    for mutant in records.mutants_of(ROOT):
        compile(mutant.applied((ROOT / mutant.file).read_bytes()), mutant.name, "exec")
        found[mutant.operator] += 1
    assert len(found) == 8


@pytest.mark.wide("mutants")
def test_nine_of_ten_recorded_tests_exist(records: ModuleType) -> None:
    tests = {record["by"] for record in RECORDS if record["how"] != "survives"}
    gone = sorted(test for test in tests if not sys.modules["sessions"].names_today(ROOT, test))
    assert len(gone) <= (1 - CURRENT) * len(tests), gone
