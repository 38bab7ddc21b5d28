"""Sessions of recorded tests, which may have gone to another file or into a wide set since they were recorded."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from slots import Slot
from workspace import Outcome

NOT_FOUND, NONE_SELECTED = 4, 5
"""pytest's exit statuses if a named test does not exist, and if it selects none of the named tests."""
PASSED = (0, NONE_SELECTED)
WIDE = ("--wide", "all")


def run_recorded(slot: Slot, tests: Sequence[str], arguments: Sequence[str], patience: float) -> tuple[Outcome, bool]:
    """(the session of the tests; whether they are all tests of wide sets).

    The exit status of the outcome is `NOT_FOUND` if none of the tests exists.
    """
    quick = run_selected(slot, tests, arguments, patience)
    if quick.status != NOT_FOUND:
        return quick, False
    return run_selected(slot, tests, (*WIDE, *arguments), patience), True


def run_selected(slot: Slot, tests: Sequence[str], arguments: Sequence[str], patience: float) -> Outcome:
    """Run recorded tests, where they are today. The exit status is `NOT_FOUND` if arguments select none of them."""
    found = [name for test in tests for name in names_today(slot.copy, test)]
    outcome = run_tests(slot, found, arguments, patience) if found else Outcome(NOT_FOUND, (), (), {}, "")
    return replace(outcome, status=NOT_FOUND) if outcome.status == NONE_SELECTED else outcome


def run_tests(slot: Slot, tests: Sequence[str], arguments: Sequence[str], patience: float) -> Outcome:
    """Run tests until one fails. If a case of a parametrized test has another name today, all cases of the test run."""
    outcome = slot.pytest("-x", "-q", *arguments, *tests, patience=patience)
    if outcome.status == NOT_FOUND:
        functions = dict.fromkeys(test.partition("[")[0] for test in tests)
        outcome = slot.pytest("-x", "-q", *arguments, *functions, patience=patience)
    return outcome


def names_today(tree: Path, test: str) -> list[str]:
    """The names of a test in a tree: in its file, or if it is not there, in files of its folder, or of the whole tree.

    A test that a class inherits from a suite is where the class is. What failed to be collected is a file.
    """
    file, _, own = test.partition("::")
    if not own:
        return [file] if (tree / file).is_file() else []
    name = own.partition("[")[0].partition("::")[0]
    stated = re.compile(rf"^\s*(?:class|(?:async )?def) {re.escape(name)}\b", re.MULTILINE)

    def found(paths: Iterable[Path]) -> list[str]:
        naming = (path for path in paths if name in _text(path))  # a plain search is quick
        return [f"{path.relative_to(tree)}::{own}" for path in naming if stated.search(_text(path))]

    known = tree / file
    beside = [path for path in files_of_tests(tree) if path.is_relative_to(known.parent)]
    return (found([known]) if known.is_file() else []) or found(beside) or found(files_of_tests(tree))


@cache
def files_of_tests(tree: Path) -> list[Path]:
    """The files with tests of a tree."""
    options = tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    return sorted(set(_files_below(tree / name for name in options["testpaths"])))


@cache
def _text(file: Path) -> str:
    return file.read_text()


def _files_below(folders: Iterator[Path]) -> Iterator[Path]:
    for folder in folders:
        yield from (file for file in folder.rglob("test_*.py") if "third_party" not in file.parts)
