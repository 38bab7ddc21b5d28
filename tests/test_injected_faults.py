"""The tools that plant faults: the faults and their tests are still there, and results become a table."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
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


def test_a_table_has_the_last_result_of_each_case_of_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number is another case if `--kinds` names other kinds."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "faults")
    monkeypatch.setattr(sys, "path", [*sys.path])
    from injected import Case, Result, read_results

    kill, stop = Case.of(0, ("kill",)), Case.of(0, ("stop",))
    results = [Result(kill, "", None, False, ""), Result(stop, "", 1.0, True, ""), Result(kill, "", 2.0, True, "")]
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(asdict(one)) + "\n" for one in results))
    assert read_results([file]) == [results[2], results[1]]
