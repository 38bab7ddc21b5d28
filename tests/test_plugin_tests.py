"""`mplug plugins test`: which tests it runs, which it leaves out, and what it prints of those that are skipped."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from mplug.cli import main
from mplug.errors import UsageError
from mplug.registry.entry_points import Registry
from mplug_testing import OptimizerSuite, plugin_tests
from mplug_testing.fast_tests import pytest_collection_modifyitems
from mplug_testing.plugin_tests import run_tests

TESTS = """
import pytest

def test_it_works(): pass
def test_it_fails(): assert False
@pytest.mark.skip(reason="it needs a chip of the year 2040")
def test_it_needs_more(): pass
"""


def test_the_tests_of_the_source_folder_run_and_skips_have_their_reasons(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "tests" / "test_own.py").write_text(TESTS)
    entry = replace(Registry().find("optimizers", "sgd"), source=str(tmp_path))
    assert run_tests(entry, ["-rs", "-p", "no:cacheprovider"]) == 1
    printed = capfd.readouterr().out
    assert "1 failed, 1 passed, 1 skipped" in printed
    assert ": it needs a chip of the year 2040" in printed
    assert run_tests(entry, ["-k", "works", "-p", "no:cacheprovider"]) == 0


def test_a_plugin_without_its_source_is_tested_by_the_suite_of_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    monkeypatch.setattr(plugin_tests, "_pytest", lambda path, _: written.append((path / "test_suite.py").read_text()))
    run_tests(replace(Registry().find("optimizers", "sgd"), source=str(tmp_path)), [])
    namespace: dict[str, Any] = {"__name__": "test_suite"}
    exec(written[0], namespace)
    assert issubclass(namespace["TestPlugin"], OptimizerSuite)
    assert namespace["TestPlugin"].plugin == "mplug-sgd/sgd"
    with pytest.raises(UsageError, match="without its tests, and its Config requires path"):
        run_tests(replace(Registry().find("data", "packed"), source=str(tmp_path)), [])


def test_fast_keeps_the_quick_tests_of_a_suite_and_all_of_the_author() -> None:
    class TestOwn(OptimizerSuite):
        plugin = "sgd"

        def test_of_the_author(self) -> None: ...

    tests = {name: getattr(TestOwn, name) for name in dir(TestOwn) if name.startswith("test_")}
    items: list[Any] = [SimpleNamespace(cls=TestOwn, function=one, originalname=name) for name, one in tests.items()]
    items.append(SimpleNamespace(cls=None, function=print, originalname="test_alone"))
    left_out: list[Any] = []
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)))
    pytest_collection_modifyitems(config, items)
    kept = {one.originalname for one in items}
    assert kept == {"test_of_the_author", "test_alone"} | {
        n for n, one in tests.items() if getattr(one, "smoke", False)
    }
    assert len(kept) > 4
    assert {one.originalname for one in left_out} == {*tests} - kept


def test_a_name_of_two_kinds_is_refused_with_the_choices() -> None:
    result = CliRunner().invoke(main, ["plugins", "test", "huggingface"])
    assert result.exit_code == 2
    assert "'huggingface' names formats/huggingface (mplug-huggingface-format" in result.output
