"""benchmarks/experts.py on a CPU, with tiny shapes: the parts of a mixture, under every kind of load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "experts.py"
LOADS = {"even", "drawn", "one"}


@pytest.mark.wide("experts")
def test_the_parts_of_a_mixture_are_measured_under_every_load(tmp_path: Path) -> None:
    out = tmp_path / "experts.json"
    command = [sys.executable, str(SCRIPT), "--tiny", "--only-parts", "--shapes", "fine", "--out", str(out)]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    parts = json.loads(out.read_text())["parts"]
    assert {one["load"] for one in parts} == LOADS
    assert all(one["seconds"] > 0 for one in parts), "no part has a reason instead of a time"
    assert shown.stdout.count("GB/s") == len(LOADS)
