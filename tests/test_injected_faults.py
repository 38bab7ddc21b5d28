"""The tools that plant faults: the faults and their tests are still there, and results become a table."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def replant() -> Iterator[ModuleType]:
    """The tool, whose modules import each other by plain names."""
    before, folder = set(sys.modules), ROOT / "benchmarks" / "faults"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        import replant

        yield replant
        for name in sys.modules.keys() - before:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == folder:
                sys.modules.pop(name)


def test_every_fault_can_be_planted_and_its_area_has_tests(replant: ModuleType) -> None:
    faults = replant.read_faults(replant.FAULTS, [])
    texts = {fault.file: (ROOT / fault.file).read_text() for fault in faults}
    assert [fault.name for fault in faults if texts[fault.file].count(fault.old) != 1] == []
    for fault in faults:
        compile(texts[fault.file].replace(fault.old, fault.new), fault.file, "exec")
    areas = replant.yaml.safe_load(replant.AREAS.read_text())
    assert {fault.area for fault in faults} <= areas.keys()
    assert [word for words in areas.values() for word in words if not replant.files_of_area([word])] == []


def test_a_missing_file_and_a_name_of_no_fault_are_refused(
    replant: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, sentence in (("keep none.jsonl", "there is no file 'none.jsonl'"), ("run --out x --only zz", "'zz'")):
        monkeypatch.setattr(sys, "argv", ["replant.py", *words.split()])
        with pytest.raises(SystemExit) as ended:
            replant.main()
        assert ended.value.code == 2
        assert sentence in capsys.readouterr().err


def test_a_recorded_test_is_found_in_the_file_to_which_it_has_gone(replant: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\ntestpaths = ["tests", "plugins"]\n')
    for name in ("tests/test_old.py", "tests/near/test_new.py", "plugins/test_new.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("def test_a(): pass\n" if "new" in name else "class TestB(Suite): pass\n")
    today = sys.modules["sessions"].names_today
    assert today(tmp_path, "tests/test_old.py::TestB::test_inherited[tp2]") == [
        "tests/test_old.py::TestB::test_inherited[tp2]"
    ]
    assert today(tmp_path, "tests/test_old.py::test_a[::1]") == ["tests/near/test_new.py::test_a[::1]"]
    assert today(tmp_path, "elsewhere/test_old.py::TestB::test_c") == ["tests/test_old.py::TestB::test_c"]
    assert today(tmp_path, "tests/test_old.py::test_gone") == today(tmp_path, "tests/test_none.py") == []


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`injected.py`, whose modules import each other by plain names."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "faults")
    monkeypatch.setattr(sys, "path", [*sys.path])
    import injected

    return injected


def test_a_plan_of_faults_ends_in_time_and_each_has_a_step_of_its_own(tool: ModuleType) -> None:
    for number in range(16):
        drawn = tool.plan(number, tool.KINDS, number % 2 == 0)
        steps = [one.at for one in drawn.faults if one.kind != "file"]
        assert all(later - earlier >= 6 for earlier, later in pairwise(steps))
        assert drawn.steps <= sys.modules["fault_plans"].STEPS
        assert all(one.rank < drawn.size for one in drawn.faults)
        assert {one.kind for one in drawn.faults} >= {*tool.KINDS} - {"cut", "slow"}


def test_a_lost_step_is_charged_to_the_last_fault_before_it_and_to_all_later_ones(
    tool: ModuleType, tmp_path: Path
) -> None:
    faults = [tool.Fault(number, "kill", 1, 10 * (number + 1), 0) for number in range(3)]
    whole = dict.fromkeys(range(1, sys.modules["fault_plans"].STEPS + 1), 1.0)
    shown = tool.Shown([tool.Result(0, "dp4", "heal", one, "rank 1 died", 2.0) for one in faults], end="whole")
    shown.losses = {**whole, 25: 2.0}
    tool.compare(shown, len(whole), whole)
    assert [bool(one.lost) for one in shown.results] == [False, True, True]
    file = tmp_path / "results.jsonl"
    rows = [{"run": 3, "is_on_machines": False, **asdict(one)} for one in (tool.Shown(false=["x"]), shown)]
    rows[1]["false"] = ["rank 3 died"] * 4
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    results, false = tool.read_results([file])
    assert (results, false) == (shown.results, 1), "the last results of a repeated run, and one sentence of four ranks"
    assert "| kill | 3 | 3 | 0 | 2.0 | 2.0 | 1 |" in tool.table(results, false)


@pytest.mark.parametrize(
    ("kind", "rank", "sentence", "is_right"),
    [
        ("kill", 2, "rank 2 on node02, in step 5, died of SIGKILL; the run goes on", True),
        ("kill", 2, "rank 2 on node02, last seen in step 5, has died or ended: its machine has no such process", True),
        ("kill", 2, "rank 3 on node02, in step 5, died of SIGKILL; the run goes on", False),
        ("kill", 2, "rank 2 on node01, in step 5, died of SIGKILL", False),
        ("stop", 3, "ranks 2 and 3 on node02, last seen in step 5, stopped sending heartbeats 5 s ago", False),
        ("slow", 1, "step 9: rank 1 on node01 is a straggler: it waits for data for 1 s", False),
        ("weight", 1, "rank 0 on node01 and rank 1 on node01 hold different bits of the master weight 'a'", True),
        ("cut", 0, "ranks 2 and 3 on node02, last seen in step 5, stopped sending heartbeats 5 s ago", True),
        ("cut", 0, "rank 0 stopped answering 6 s ago: the process is suspended, or its machine, which serves", True),
        ("cut", 0, "rank 3 on node02, last seen in step 5, stopped sending heartbeats 5 s ago", False),
    ],
)
def test_a_sentence_is_right_only_with_the_rank_the_machine_and_the_kind(
    tool: ModuleType, kind: str, rank: int, sentence: str, is_right: bool
) -> None:
    hosts = ["node01", "node01", "node02", "node02"]
    assert bool(re.search(tool.Fault(0, kind, rank, 5, 0).expected(hosts), sentence)) is is_right
