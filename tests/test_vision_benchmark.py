"""benchmarks/vision.py on a CPU, with a tiny model: both participants train on the same micro batches."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "vision.py"
TINY = ["--preset", "tiny", "--steps", "2", "--batches", "2", "--media", "1", "--sides", "16", "64", "--length", "320"]
PIXELS = ["--set", "model.vision.min_pixels=65536", "--set", "model.vision.max_pixels=262144"]
VOCABULARY = 512


@pytest.mark.wide("families")
def test_mplug_and_the_library_train_on_the_same_micro_batches(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), *TINY, "--library", "sdpa", "--out", str(out)]
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
