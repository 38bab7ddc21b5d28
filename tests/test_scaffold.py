"""A plugin that `mplug plugins new` has written installs, passes its suite, and runs."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Cli
from warm import STRICT, run_module

from mplug.registry.entry_points import KINDS

SMALL = {"trainer.steps": 3, "trainer.global_batch_size": 4, "trainer.eval_every": 0, "trainer.seq_length": 32}
USE = {
    "models": ("train", "--model", "ringo"),
    "parallel": ("train", "--parallel", "ringo2"),
    "kernels": ("train", "--attention", "ringo"),
    "optimizers": ("train", "--optimizer", "ringo"),
    "precisions": ("train", "--precision", "ringo"),
    "data": ("train", "--data", "ringo"),
    "formats": ("checkpoint", "export", "--to", "ringo", "pages"),
    "tokenizers": ("data", "preprocess", "texts.jsonl", "--tokenizer", "ringo"),
    "memory": ("train", "--set", "memory.ringo.every=1"),
    "adapters": ("train", "--adapt", "ringo"),
    "objectives": ("train", "--objective", "ringo"),
    "extensions": ("train", "--set", "extensions.ringo.every=1"),
    "commands": ("ringo",),
}


UNTRAINED = {"commands", "tokenizers", "formats"}
"""The kinds that no training run uses."""
SUITES = [kind if kind == "tokenizers" else pytest.param(kind, marks=pytest.mark.wide("scaffold")) for kind in KINDS]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    for kind in KINDS:
        words = ("plugins", "new", "--kind", kind, f"{kind}-ringo")
        made = run_module("mplug", *words, cwd=folder, environment=os.environ)
        assert made.returncode == 0, made.stderr
        assert " ".join(("mplug", *USE[kind][:3])) in made.stdout
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, install: Callable[..., Path], written: Path) -> Path:
    return install(tmp_path_factory.mktemp("site"), *sorted(written.iterdir()))


@pytest.mark.parametrize("kinds", [("models", "parallel"), pytest.param(KINDS, marks=pytest.mark.wide("scaffold"))])
@pytest.mark.wide("scaffold")
def test_new_plugins_of_all_kinds_install_and_pass_the_checks(cli: Cli, site: Path, kinds: tuple[str, ...]) -> None:
    checked = cli("plugins", "check", *(f"{kind}/ringo" for kind in kinds), path=site)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(kinds)} of {len(kinds)} plugins pass" in checked.stdout


def test_new_plugins_of_all_kinds_run(cli: Cli, site: Path, tmp_path: Path) -> None:
    """Those that a training run uses run together."""
    trained = [words for words in USE.values() if words[0] == "train"]
    assert len(trained) == len(KINDS) - len(UNTRAINED)
    (tmp_path / "texts.jsonl").write_text('{"text": "some"}\n')
    small = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    together = ("train", *(word for _, *options in trained for word in options), *small)
    for words in (together, *(USE[kind] for kind in sorted(UNTRAINED))):
        used = cli(*words, path=site)
        assert used.returncode == 0, used.stderr


def run_suite(folder: Path, kind: str, *words: str, path: tuple[Path, ...]) -> subprocess.CompletedProcess[str]:
    places = os.pathsep.join((*map(str, path), os.environ.get("PYTHONPATH", "")))
    words = ("-q", "-p", "no:cacheprovider", *STRICT, *words, f"{kind}-ringo")
    return run_module("pytest", *words, cwd=folder, environment={**os.environ, "PYTHONPATH": places})


@pytest.mark.parametrize("kind", SUITES)
def test_a_new_plugin_passes_its_suite(site: Path, written: Path, kind: str) -> None:
    suite = run_suite(written, kind, path=(site,))
    assert suite.returncode == 0, suite.stdout[-5000:] + suite.stderr
    assert " passed" in suite.stdout
    if " skipped" in suite.stdout:
        assert "SKIPPED [" in suite.stdout  # with its reason


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "words", "test"),
    [
        ("tokenizers", "cannot read path '{path}'", "cannot read it", (), "test_errors_name_the_file"),
        ("data", "else 2**40", "else 0", ("-k", "splits"), "test_the_splits_draw_different_samples"),
    ],
)
def test_the_suite_of_a_new_plugin_fails_for_a_fault(
    site: Path, written: Path, tmp_path: Path, kind: str, right: str, wrong: str, words: tuple[str, ...], test: str
) -> None:
    """The suite as it was written sees a fault in the plugin as it was written."""
    shutil.copytree(written / f"{kind}-ringo", tmp_path / f"{kind}-ringo")
    source = tmp_path / f"{kind}-ringo" / "src"
    module = source / f"{kind}_ringo" / "__init__.py"
    assert right in module.read_text(encoding="utf-8")
    module.write_text(module.read_text(encoding="utf-8").replace(right, wrong), encoding="utf-8")
    suite = run_suite(tmp_path, kind, "-rf", *words, path=(source, site))
    assert suite.returncode == 1, suite.stdout[-5000:] + suite.stderr
    assert f"::{test}" in suite.stdout


def test_no_package_is_written_over_another(cli: Cli, tmp_path: Path) -> None:
    """tests/refusals.yaml has the names that are refused."""
    (tmp_path / "acme-ringo").mkdir()
    result = cli("plugins", "new", "--kind", "kernels", "acme-ringo")
    assert (result.returncode, "'acme-ringo' already exists" in result.stderr) == (2, True)
    assert [path.name for path in tmp_path.rglob("*")] == ["acme-ringo"]
