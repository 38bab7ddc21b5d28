"""The results of injected faults, of which `benchmarks/faults/injected.py` makes a table."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest


def test_a_table_has_the_last_result_of_each_case_of_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number is another case if `--kinds` names other kinds."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks" / "faults")
    monkeypatch.setattr(sys, "path", [*sys.path])
    from injected import Case, Result, read_results

    kill, stop = Case.of(0, ("kill",)), Case.of(0, ("stop",))
    results = [Result(kill, "", None, False, ""), Result(stop, "", 1.0, True, ""), Result(kill, "", 2.0, True, "")]
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(asdict(one)) + "\n" for one in results))
    assert read_results([file]) == [results[2], results[1]]
