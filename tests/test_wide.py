"""`pytest --wide SET` runs the tests of that set and no other; without the option, those of no set run."""

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
TESTS = """
import pytest

def test_quick(): pass

@pytest.mark.wide("layouts")
def test_more_layouts(): pass

@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.wide("kills"))])
def test_kills(kills): pass

@pytest.mark.wide("layouts", quick=["tp2", "dp2-b"])
@pytest.mark.parametrize(("layout", "model"), [("dp2", "a"), ("dp2", "b")])
def test_cases(layout, model): pass

@pytest.mark.wide("layouts", tests=["test_inherited"])
class TestSuite:
    def test_inherited(self): pass
    def test_own(self): pass

@pytest.mark.wide("layouts", quick=["test_kept"])
class TestAnother:
    def test_kept(self): pass
    def test_moved(self): pass
"""

LAYOUTS = {"test_more_layouts", "test_cases[dp2-a]", "TestSuite::test_inherited", "TestAnother::test_moved"}


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder of three tests under the conftest.py of this repository."""
    root = Path(__file__).parent.parent
    pytester.makeconftest((root / "conftest.py").read_text())
    pytester.makepyprojecttoml(re.sub("testpaths = .*", "", (root / "pyproject.toml").read_text()))
    pytester.makepyfile(test_sets=TESTS)
    return pytester


def run_tests(project: pytest.Pytester, *options: str) -> set[str]:
    """Run pytest in the folder; returns the tests that ran."""
    result = project.inline_run("-p", "no:cacheprovider", "-p", "no:hypothesispytest", *options)
    assert result.ret == 0
    return {report.nodeid.partition("::")[2] for report in result.getreports("pytest_runtest_logreport")}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"test_quick", "test_kills[1]", "test_cases[dp2-b]", "TestSuite::test_own", "TestAnother::test_kept"}),
        (["--wide", "layouts"], LAYOUTS),
        (["--wide", "kills", "--wide", "layouts"], {*LAYOUTS, "test_kills[50]"}),
        (["--wide", "all"], {*LAYOUTS, "test_kills[50]"}),
    ],
    ids=["quick", "one set", "two sets", "all"],
)
def test_a_test_of_a_set_runs_under_that_set_and_only_there(
    project: pytest.Pytester, options: list[str], expected: set[str]
) -> None:
    assert run_tests(project, *options) == expected


def test_the_workers_of_xdist_select_the_same_tests(project: pytest.Pytester) -> None:
    assert run_tests(project, "-n", "1", "--wide", "kills") == {"test_kills[50]"}


def test_an_unknown_set_is_refused_on_the_command_line_and_in_a_mark(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess("-p", "no:hypothesispytest", "--wide", "layuots")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--wide: invalid choice: 'layuots'*kills*layouts*"])
    project.makepyfile(test_mistake='import pytest\n\n@pytest.mark.wide("layuots")\ndef test_it(): pass\n')
    result = project.runpytest_inprocess("-p", "no:hypothesispytest")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*test_mistake.py::test_it: no wide set*layuots*"])


def test_a_mark_that_names_a_test_which_its_class_lacks_is_refused(project: pytest.Pytester) -> None:
    mark = '@pytest.mark.wide("layouts", tests=["test_thta"])'
    project.makepyfile(test_mistake=f"import pytest\n\n{mark}\nclass TestIt:\n    def test_that(self): pass\n")
    result = project.runpytest_inprocess("-p", "no:hypothesispytest")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*test_that: the mark wide names tests that its class lacks: *test_thta*"])


def test_help_describes_every_set(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess("-p", "no:hypothesispytest", "--help")
    result.stdout.fnmatch_lines(["*layouts: more layouts*", "*suites: every planted mistake*"])
