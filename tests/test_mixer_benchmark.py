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
    (mixer,) = found["mixers"]
    assert mixer["seconds"] > 0


@pytest.mark.wide("compile")
def test_what_fails_has_its_reason_and_the_others_their_figures(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), "--tiny", "--lengths", "64", "--decoders", "hybrid", "--layouts", "cp0"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    (decoder,), (mixer,) = found["decoders"], found["mixers"]
    assert "cp0" in decoder["reason"]
    assert (decoder["ratio"], mixer["seconds"] > 0) == (None, True)
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [one["name"] for one in printed] == ["hybrid", "mplug, plain torch, eager"]
