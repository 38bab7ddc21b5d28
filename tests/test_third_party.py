"""Packages of strangers: built as wheels, installed into an environment of their own, used by name in real runs.

`tests/third_party/` is built as it stands; `tests/frozen/` holds wheels that were built for an earlier host.
"""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from warm import run_module

HERE = Path(__file__).parent
SOURCES = sorted(path.parent for path in HERE.glob("third_party/*/pyproject.toml"))

Mplug = Callable[..., subprocess.CompletedProcess[str]]


def called(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command with nothing of this checkout on its path."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment}
    return subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A wheel of every package of `third_party/`, built by its own backend."""
    folder = tmp_path_factory.mktemp("wheels")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # where uv_build finds uv-build
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    built = called(*command, "--wheel-dir", folder, *SOURCES, cwd=folder, PATH=path)
    assert built.returncode == 0, built.stderr
    return sorted(folder.glob("*.whl"))


def scratch(folder: Path, wheels: list[Path]) -> tuple[Mplug, Mplug]:
    """An environment with these wheels, which sees what this one has.

    Returns its `mplug` in a new interpreter, and the same in a fork of a process that has imported torch.
    """
    made = called(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    assert made.returncode == 0, made.stderr
    python = folder / "env" / "bin" / "python"
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    here = sysconfig.get_paths()["purelib"]
    (site / "outer.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    options = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--target", site)
    installed = called(sys.executable, "-m", "pip", "install", *options, *wheels, cwd=folder)
    assert installed.returncode == 0, installed.stderr

    def mplug(*words: str) -> subprocess.CompletedProcess[str]:
        return called(python, "-m", "mplug", *words, cwd=folder)

    def forked(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": str(site)}
        return run_module("mplug", *words, cwd=folder, environment=environment)

    return mplug, forked


def write_texts(path: Path) -> None:
    """JSON lines with enough in them for a few steps."""
    lines = [json.dumps({"text": f"{a} times {b} is {a * b}."}) for a in range(40) for b in range(26)]
    path.write_text("\n".join(lines) + "\n")


SMALL = {
    "model.preset": "nano",
    "trainer.steps": 6,
    "trainer.precision": "fp64",
    "trainer.seq_length": 64,
    "trainer.global_batch_size": 4,
    "trainer.micro_batch_size": 2,
    "trainer.eval_every": 0,
    "trainer.device": "cpu",
    "schedule.warmup_steps": 2,
    "checkpoint.every": 3,
    "data.path": "texts.jsonl",
    "extensions.plotter.every": 2,
}
NAMED = ("--model", "peregrine", "--attention", "ringo", "--optimizer", "orthon", "--data", "jotter")
OPTIONS = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]


def losses_of(mplug: Mplug, folder: Path, name: str, *words: str) -> list[float]:
    """The losses of a run of that name."""
    result = mplug("train", "--name", name, *words, *OPTIONS)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def assert_they_train_together(mplug: Mplug, forked: Mplug, folder: Path, *layouts: str) -> None:
    """A run of all of them, alone, divided, and resumed: the same losses; and its record names their distributions."""
    write_texts(folder / "texts.jsonl")
    alone = losses_of(mplug, folder, "one", *NAMED)
    for layout in layouts:
        divided = losses_of(forked, folder, layout, *NAMED, "--parallel", layout)
        assert divided == pytest.approx(alone, rel=1e-10), layout
    resumed = forked("train", "--resume", "--name", "one", "--set", "trainer.steps=8")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert list((folder / "runs" / "one").glob("*.svg"))
    told = forked("tally")
    assert told.returncode == 0, told.stderr
    assert "one" in told.stdout
    record = json.loads((folder / "runs" / "one" / "record.json").read_text())
    named = {plugin["distribution"] for plugin in record["plugins"]}
    ours = {"nova-peregrine", "nova-ringo", "nova-orthon", "nova-jotter", "nova-plotter"}
    assert named == {*ours, "mplug-losspicture", "mplug-sdpa", "mplug-watchdog", "mplug"}


def assert_undeclared_blocks_are_refused(forked: Mplug) -> None:
    """A model that does not say what its blocks mix does not train where its sequence is divided."""
    refused = forked("train", "--name", "refused", *NAMED, *OPTIONS, "--parallel", "ulys2")
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "parallel/ulys divides the sequence (ulys=2), and no declaration states whether" in refused.stderr
    assert "add to ParallelBlock and Readout `mixes = frozenset({'sequence'})` if so" in refused.stderr


def test_packages_of_strangers_train_together_by_name(tmp_path: Path, wheels: list[Path]) -> None:
    mplug, forked = scratch(tmp_path, wheels)
    listed = mplug("plugins", "list")
    assert [source.name for source in SOURCES if f"{source.name} 1.0.0" not in listed.stdout] == [], listed.stdout
    assert_they_train_together(mplug, forked, tmp_path, "pp2")
    assert_undeclared_blocks_are_refused(forked)
