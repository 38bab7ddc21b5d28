"""benchmarks/mixers.py on a CPU, with tiny models."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "mixers.py"


@pytest.mark.wide("families")
def test_both_decoders_and_a_mixer_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), "--tiny", "--lengths", "64", "--steps", "2", "--warmup", "1"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    dense, hybrid = found["decoders"]
    assert (dense["name"], hybrid["name"], dense["ratio"]) == ("dense", "hybrid", 1.0)
    assert hybrid["ratio"] == pytest.approx(hybrid["tokens_per_s"] / dense["tokens_per_s"])
    (mixer,) = found["layers"]
    assert mixer["seconds"] > 0
