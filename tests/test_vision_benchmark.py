"""benchmarks/vision.py and balance.py on a CPU, with a tiny model: the participants train on the same micro batches."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
TINY = ["--preset", "tiny", "--steps", "2", "--batches", "2", "--media", "1", "--sides", "16", "64", "--length", "320"]
PIXELS = ["--set", "model.vision.min_pixels=65536", "--set", "model.vision.max_pixels=262144"]
VOCABULARY = 512
UNEQUAL = ["--length", "320", "--median", "12", "--largest", "64", "--text", "12", "--steps", "4", "--rounds", "1"]


@pytest.mark.wide("families")
def test_mplug_and_the_library_train_on_the_same_micro_batches(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "vision.py"), *TINY, "--library", "sdpa", "--out", str(out)]
    done = subprocess.run(
        [*command, "--set", "trainer.compile=never", "--set", "trainer.device=cpu", *PIXELS],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    ours, theirs = json.loads(out.read_text())
    assert ours["work"] == theirs["work"]
    assert ours["work"]["tokens"] == 2 * 320
    assert ours["work"]["patches"] > 2 * 1000, "a picture has at least 256 x 256 pixels, and a patch 8 x 8"
    for one in (ours, theirs):
        assert len(one["seconds"]) == 2
        assert one["loss"] == pytest.approx(math.log(VOCABULARY), rel=0.05), "random weights, random tokens"
    assert "ratio of tokens/s" in done.stdout


@pytest.mark.wide("families")
def test_the_variants_of_the_balance_benchmark_compute_equally_much(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "balance.py"), "--preset", "tiny", "--layout", "dp2", *UNEQUAL]
    settings = ("trainer.compile=never", "trainer.device=cpu")
    done = subprocess.run(
        [*command, *(word for one in settings for word in ("--set", one)), "--out", str(out)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    variants = found["variants"]
    totals = {name: {unit: one[unit] for unit in ("tokens", "patches", "flops")} for name, one in variants.items()}
    assert totals["same"] == totals["unbalanced"] == totals["balanced"]
    assert {one["tokens"] for one in totals.values()} == {4 * 2 * 320}
    assert totals["equal"]["patches"] == pytest.approx(totals["balanced"]["patches"], rel=0.2)
    assert variants["equal"]["imbalance"] == variants["same"]["imbalance"] == 1
    assert variants["unbalanced"]["imbalance"] > 1.1
    assert json.loads(done.stdout.splitlines()[-1]) == found
    assert found["loss"] == pytest.approx(math.log(VOCABULARY), rel=0.05), "random tokens"
