"""The page of `mplug report`: its curves, its tables, and what a real browser draws of it."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly")

import yaml
from mplug_report.curves import MOST_POINTS, curves_of
from mplug_report.page import page_of
from mplug_report.settings import differing, settings_of

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def record(step: int, **more: Any) -> dict[str, Any]:
    always = {"step": step, "loss": 4 / step, "grad_norm": 1.0, "lr": 1e-3, "tokens": 8 * step, "step_s": 0.5}
    return {**always, "tokens_per_s": 16.0, "tflops": 0.1, "mfu": None, "memory_gib": 2.0, "skipped": False, **more}


def write(directory: Path, records: Sequence[Mapping[str, Any]], **settings: Any) -> Path:
    (directory / "logs").mkdir(parents=True)
    config = {"model": {"name": "gpt"}, "trainer": {"steps": 4}, "optimizer": settings}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    (directory / "record.json").write_text(json.dumps({"torch": "2.13.0", "layout": "", "world_size": 1}))
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """A run of experts in a pipeline, and one whose name and settings look like HTML."""
    load = {"statistics": {"blocks.0.moe.router.load": [1, 3], "blocks.1.moe.router.load": [2, 2]}}
    first = [record(step, bubble=0.25, **load) for step in range(1, 4)] + [record(4, val_loss=1.5, mfu=0.4, **load)]
    second = [record(step) for step in range(1, 5)]
    return [
        write(tmp_path / "first", first, lr=1e-3, name="adamw"),
        write(tmp_path / "<b>second", second, lr="</script><b>2</b>", name="adamw"),
    ]


# Curves.


def test_every_number_of_a_record_has_a_curve_over_steps_tokens_and_time() -> None:
    found = curves_of([record(1, own=1.0), record(2, own=3.0, val_loss=2.0)])
    assert found.axes == {"step": [1, 2], "tokens": [8, 16], "seconds": [0.5, 1.0]}
    assert found.values["loss"] == [4.0, 2.0]
    assert found.values["val_loss"] == [None, 2.0]
    assert found.values["own"] == [1.0, 3.0]
    assert not {"mfu", "skipped", "step", "tokens"} & set(found.values)  # unknown, false, and the axes
    assert curves_of([record(1, skipped=True), record(2)]).values["skipped"] == [1.0, 0.0]


def test_the_points_of_a_long_run_are_means_at_their_last_steps() -> None:
    steps = 3 * MOST_POINTS - 1
    found = curves_of([record(step, loss=float(step)) for step in range(1, steps + 1)])
    assert (found.width, len(found.values["loss"])) == (3, MOST_POINTS)
    assert found.axes["step"][:2] == [3, 6]
    assert found.values["loss"][:2] == [2.0, 5.0]
    assert (found.axes["step"][-1], found.values["loss"][-1]) == (steps, steps - 0.5)
    assert found.axes["seconds"][-1] == steps / 2


def test_the_load_of_experts_is_the_largest_over_the_mean() -> None:
    """Of the modules 0 and 1, module 0 has the busiest expert: 6 of 8 choices, where the mean is 4."""
    loads = {"blocks.0.moe.router.load": [6, 2], "blocks.1.moe.router.load": [3, 5]}
    more = {"blocks.0.a": 1.0, "blocks.1.a": 2.0, "blocks.0.losses": [1.0, 5.0], "far": list(range(9))}
    found = curves_of([record(1, statistics={**loads, **more})])
    assert found.values["blocks.*.moe.router.load, largest over mean"] == [1.5]
    assert found.values["blocks.*.a"] == [1.5]
    assert (found.values["blocks.*.losses[0]"], found.values["blocks.*.losses[1]"]) == ([1.0], [5.0])
    assert found.values["far, largest"] == [8.0]
    assert found.loads == {"blocks.0.moe.router.load": [1.5, 0.5], "blocks.1.moe.router.load": [0.75, 1.25]}


# The page.


def test_only_settings_that_differ_are_in_the_table_of_differences(runs: list[Path]) -> None:
    found = settings_of(runs)
    assert found["optimizer.name"] == ["adamw", "adamw"]
    assert differing(found) == {"optimizer.lr": ["0.001", "</script><b>2</b>"]}


def test_the_page_loads_nothing_and_no_text_of_a_run_becomes_markup(runs: list[Path]) -> None:
    page, missing = page_of(runs)
    assert missing == []
    own = re.sub(r"<script>.*?</script>", "", page, count=1, flags=re.DOTALL)  # without plotly itself
    assert not re.search(r"""(src|href)\s*=|@import|url\(|https?://|<b>""", own)
    assert "&lt;/script&gt;&lt;b&gt;2&lt;/b&gt;" in own


def test_a_run_without_steps_is_reported_and_has_a_row(tmp_path: Path) -> None:
    page, missing = page_of([write(tmp_path / "empty", []), write(tmp_path / "full", [record(1)])])
    assert missing == ["the run 'empty' has no steps yet"]
    assert "<th>empty</th><td>failed</td>" in page


def test_the_command_takes_names_folders_and_the_newest_run(tmp_path: Path, cli_here: Any) -> None:
    elsewhere = write(tmp_path / "elsewhere" / "other", [record(1)])
    write(tmp_path / "runs" / "first", [record(1)])
    both = cli_here("report", "first", str(elsewhere), "--output", "both.html")
    assert (both.returncode, both.stdout) == (0, "wrote both.html: 2 runs; open it in a browser\n")
    assert "mplug report: first, other</title>" in (tmp_path / "both.html").read_text()
    assert cli_here("report").stdout == "wrote report.html: 1 run; open it in a browser\n"
    for words, message in (
        (["none"], "there is no run 'none' in 'runs' (newest runs: first)"),
        (["elsewhere/none"], "there is no run in the folder 'elsewhere/none', because it has no config.yaml"),
        (["--output", "none/a.html"], "cannot write --output 'none/a.html': No such file or directory"),
    ):
        refused = cli_here("report", *words)
        assert refused.returncode == 2
        assert message in refused.stderr


class Drawn(HTMLParser):
    """By the id of a picture, the number of lines in it, of single points, and of images."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[int]] = {}
        self._picture = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        classes = (values.get("class") or "").split()
        if "plot" in classes:
            self._picture = values["id"] or ""
            self.found[self._picture] = [0, 0, 0]
        is_line = tag == "path" and "js-line" in classes and re.match("M[0-9].*[LHV]", values.get("d") or "")
        for place, one in enumerate((is_line, tag == "path" and "point" in classes, tag == "image")):
            if one:
                self.found[self._picture][place] += 1


def drawn(page: str, folder: Path, *options: str) -> tuple[str, dict[str, list[int]]]:
    """The page after a real browser has drawn it, and what is in its pictures."""
    file = folder / "report.html"
    file.write_text(page, encoding="utf-8")
    size = ["--window-size=1200,2400", "--virtual-time-budget=5000", f"--user-data-dir={folder / 'profile'}"]
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        *size,
        "--dump-dom",
        *options,
        file.as_uri(),
    ]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert 'data-drawn="yes"' in dumped
    found = Drawn()
    found.feed(dumped)
    return dumped, found.found


needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")


@pytest.mark.wide("site")
@needs_browser
def test_a_browser_draws_every_curve_of_every_picture(runs: list[Path], tmp_path: Path) -> None:
    """Smoothed figures have two lines for each run: the values and their average."""
    shot = tmp_path / "shot.png"
    _, found = drawn(page_of(runs)[0], tmp_path, f"--screenshot={shot}")
    load = "panel-blocks.*.moe.router.load, largest over mean"
    once, twice = {"lr": 2, "memory_gib": 2}, {"loss": 4, "grad_norm": 4, "tokens_per_s": 4, "tflops": 4, "step_s": 4}
    lines = {f"panel-{name}": number for name, number in {**once, **twice, "bubble": 2}.items()} | {load: 2}
    expected = {name: [number, 0, 0] for name, number in lines.items()}
    expected |= {"panel-val_loss": [0, 1, 0], "panel-mfu": [0, 2, 0], "loads-first": [0, 0, 1]}
    assert found == expected
    assert shot.read_bytes().startswith(b"\x89PNG")
    assert len(shot.read_bytes()) > 30_000  # a page of one colour has 10 kB


CONTROLS = """
<script>
  const change = (id, values) => {
    Object.assign(document.getElementById(id), values);
    document.getElementById(id).dispatchEvent(new Event("input"));
  };
  change("axis", { value: "seconds" });
  change("smoothing", { value: 0 });
  change("log", { checked: true });
  document.querySelector("#legend button").click();
  const loss = document.getElementById("panel-loss");
  const state = [loss.layout.xaxis.title.text, loss.layout.yaxis.type, loss.data.map((trace) => [trace.name, trace.x])];
  const output = Object.assign(document.createElement("output"), { id: "state", textContent: JSON.stringify(state) });
  document.body.append(output);
</script>
"""


@needs_browser
@pytest.mark.wide("site")
def test_the_controls_change_the_axis_the_smoothing_and_the_runs(runs: list[Path], tmp_path: Path) -> None:
    dumped, found = drawn(page_of(runs)[0].replace("</body>", f"{CONTROLS}</body>"), tmp_path)
    title, scale, traces = json.loads(html.unescape(re.findall('<output id="state">(.*?)</output>', dumped)[0]))
    assert (title, scale) == ("training time, seconds", "log")
    assert traces == [["<b>second", [0.5, 1.0, 1.5, 2.0]]]
    assert (found["panel-loss"], found["panel-lr"], found["panel-bubble"]) == ([1, 0, 0], [1, 0, 0], [0, 0, 0])


# Trained runs.

BASE = (
    "--set", "trainer.device=cpu", "--set", "trainer.compile=never", "--steps", "4", "--batch-size", "4",
    "--set", "trainer.eval_every=2", "--set", "trainer.eval_samples=4", "--data", "mock",
)  # fmt: skip
SMALL = (
    "--seq-length", "32", "--set", "model.num_layers=2", "--set", "model.hidden_size=32",
    "--set", "model.num_attention_heads=4", "--set", "model.vocab_size=64",
)  # fmt: skip
KINDS = {
    "experts": ("--model", "mixtral", *SMALL),
    "pipeline": ("--model", "gpt", *SMALL, "--parallel", "pp2", "--set", "trainer.micro_batch_size=1"),
    "vision": ("--model", "qwen-vl", "--preset", "tiny", "--seq-length", "256", "--set", "data.media=2"),
}
ALWAYS = {"loss", "val_loss", "grad_norm", "lr", "tokens_per_s", "tflops", "memory_gib", "step_s"}
"""The figures that each run records on a CPU. MFU needs a chip whose peak is known; test_report has its curve."""


@needs_browser
@pytest.mark.wide("site")
def test_each_kind_of_run_has_its_curves(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, words in KINDS.items():
        command = [sys.executable, "-m", "mplug", "train", "--name", name, *BASE, *words]
        finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr
    _, found = drawn(page_of([tmp_path / "runs" / name for name in KINDS])[0], tmp_path)
    lines, points = {name: one[0] for name, one in found.items()}, {name: one[1] for name, one in found.items()}
    assert points["panel-val_loss"] == 2 * len(KINDS)  # after steps 2 and 4
    for figure in ALWAYS - {"val_loss"}:
        # Runs of four steps have a line for the values, and smoothed figures one for the average too.
        assert lines[f"panel-{figure}"] in (len(KINDS), 2 * len(KINDS)), figure
    own = {name for name in found if name.removeprefix("panel-") not in ALWAYS}
    (load,) = (name for name in own if "load" in name and name.startswith("panel-"))
    assert lines[load] in (1, 2)
    assert found["loads-experts"][2] == 1
    assert lines["panel-bubble"] in (1, 2)
    assert {name for name in own if "patches" in name} >= {"panel-patches_per_s"}
    assert lines["panel-patches_per_s"] in (1, 2)
