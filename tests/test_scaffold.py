"""A plugin that `mplug plugins new` has written installs, passes its suite, and runs."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mplug.registry import KINDS

Cli = Callable[..., subprocess.CompletedProcess[str]]
SMALL = {"trainer.steps": 3, "trainer.global_batch_size": 4, "trainer.eval_every": 0, "trainer.seq_length": 32}
USE = {
    "models": ("train", "--model", "ringo"),
    "parallel": ("train", "--parallel", "ringo2"),
    "kernels": ("train", "--attention", "ringo"),
    "optimizers": ("train", "--optimizer", "ringo"),
    "data": ("train", "--data", "ringo"),
    "tokenizers": ("data", "preprocess", "texts.jsonl", "--tokenizer", "ringo"),
    "memory": ("train", "--set", "memory.ringo.every=1"),
    "extensions": ("train", "--set", "extensions.ringo.every=1"),
    "commands": ("ringo",),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_plugin_installs_passes_its_suite_and_runs(
    cli: Cli, install: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    made = cli("plugins", "new", "--kind", kind, "acme-ringo")
    assert made.returncode == 0, made.stderr
    assert " ".join(("mplug", *USE[kind][:3])) in made.stdout
    site = install(tmp_path / "site", tmp_path / "acme-ringo")
    checked = cli("plugins", "check", "ringo", path=site)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    path = os.pathsep.join((str(site), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "acme-ringo"]
    suite = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert suite.returncode == 0, suite.stdout[-5000:] + suite.stderr
    (tmp_path / "texts.jsonl").write_text('{"text": "some"}\n')
    small = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    used = cli(*USE[kind], *(small if USE[kind][0] == "train" else ()), path=site)
    assert used.returncode == 0, used.stderr


def test_what_is_written_is_neither_over_another_nor_named_like_one(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "acme-ringo").mkdir()
    for words, said in (
        (("--kind", "kernels", "acme-ringo"), "'acme-ringo' exists"),
        (("--kind", "kernels", "acme-sdpa"), "kernels/sdpa is installed already"),
        (("--kind", "kernels", "Acme Ringo"), "is not a distribution's name"),
        (("--kind", "parallel", "acme-r2"), "letters only"),
    ):
        result = cli("plugins", "new", *words)
        assert result.returncode == 2
        assert said in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["acme-ringo"]
    assert list((tmp_path / "acme-ringo").iterdir()) == []
