"""docs/plugins-tutorial.md: its commands print what it shows, and its code works."""

import re
import runpy
import shlex
from pathlib import Path
from textwrap import dedent, indent
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from mplug.cli import main
from mplug.registry.hooks import faults, implemented

PAGE = (Path(__file__).parent.parent / "docs" / "plugins-tutorial.md").read_text()


def block(first: str) -> str:
    """The indented block of the page whose first line begins with these words."""
    found = re.search(rf"^    {re.escape(first)}.*\n(?:    .*\n|\n(?=    ))*", PAGE, re.MULTILINE)
    assert found, f"the page has no block that begins with '{first}'"
    return dedent(found[0])


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package of the tutorial, after a comparison of the command's output with the page."""
    monkeypatch.chdir(tmp_path)
    command, _, shown = block("$ mplug plugins new").partition("\n")
    written = CliRunner().invoke(main, shlex.split(command)[2:])
    assert written.exit_code == 0, written.output
    assert written.output.rstrip() == shown.rstrip()
    return tmp_path / "acme-ringo"


def test_the_tutorial_shows_the_class_and_the_entry_point_that_the_command_writes(package: Path) -> None:
    assert block("class Ringo:") in (package / "src/acme_ringo/__init__.py").read_text()
    assert block('[project.entry-points."mplug.extensions"]') in (package / "pyproject.toml").read_text()


def test_the_change_of_the_tutorial_writes_a_row_for_a_checkpoint(package: Path, tmp_path: Path) -> None:
    module = package / "src/acme_ringo/__init__.py"
    changed = block("@hookimpl\n    def checkpoint_saved")
    module.write_text(f"{module.read_text()}\n{indent(changed, '    ')}")
    plugin: Any = runpy.run_path(str(module))["Ringo"]
    assert faults(plugin) == []
    assert implemented(plugin) == ["checkpoint_saved", "step_finished"]
    run = SimpleNamespace(rank=0, directory=tmp_path, step=7)
    plugin(plugin.Config()).checkpoint_saved(run=run, path=Path("checkpoints/step_00000007"))
    assert (tmp_path / "losses.csv").read_text() == "7,step_00000007\n"


def test_the_tutorial_shows_the_error_of_a_misspelt_field(package: Path) -> None:
    command, _, shown = block("$ mplug train --set extensions.ringo.evry").partition("\n")
    fields = runpy.run_path(str(package / "src/acme_ringo/__init__.py"))["Ringo"].Config.model_fields
    assert shlex.split(command)[-1] == "extensions.ringo.evry=2"
    assert shown.rstrip().endswith(f"unknown field; did you mean 'every'? (fields: {' and '.join(fields)})")
