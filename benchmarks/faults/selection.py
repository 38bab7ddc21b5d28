"""Which tests a mutant is tried with, and in which order."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mutants import Mutant, functions_in
from records import TREE
from run import BETWEEN
from workspace import Recorded, digest, function_lines

BATCHES = (12.0, 30.0, 60.0)
"""Predicted seconds of tests in the first pytest sessions of a mutant; further sessions are like the last of these."""


@dataclass(frozen=True)
class Coverage(Recorded):
    """Which tests execute which lines and functions of the mutated files."""

    def executing(self, mutant: Mutant, source: str) -> list[int]:
        """The numbers of the tests that execute the mutated statement, or its function if the file was edited since.

        If it runs only while no test does (at an import, in a fixture of a session), those that execute the file. The
        same for a function that is new.
        """
        return sorted(self._beside(self._itself(mutant, source), "@cache\n" in source))

    def _itself(self, mutant: Mutant, source: str) -> set[int]:
        held = self.files.get(mutant.file, {"digest": "", "lines": {}, "functions": {}})
        lines, functions = held["lines"], held["functions"]
        if held["digest"] != digest(TREE / mutant.file):
            found = functions.get(mutant.name.split("::")[1], [one for many in functions.values() for one in many])
            return self._tests(found)
        found = {number for line in mutant.lines for number in lines.get(str(line), ())}
        if found and not self._tests(found):
            found = {number for line in function_lines(source) for number in lines.get(str(line), ())}
        return self._tests(found)

    def _tests(self, numbers: Iterable[int]) -> set[int]:
        return {one for one in numbers if self.tests[one] != BETWEEN and self.tests[one] not in self.failed}

    def _beside(self, numbers: set[int], keeps: bool) -> set[int]:
        """These tests, and where tests of a file share what the first of them computes, all tests of the file.

        They do so if the file's tests keep results, or if the mutated file `keeps` those of functions.
        """
        files = {self.tests[number].partition("::")[0] for number in numbers}
        sharing = {file for file in files if keeps or _shares(TREE / file)}
        tests = (number for number, test in enumerate(self.tests) if test.partition("::")[0] in sharing)
        return numbers | self._tests(tests)

    def ordered(self, numbers: Iterable[int], kills: "Kills", mutant: Mutant) -> list[int]:
        """Tests in the order in which they are tried.

        The best killers of the function's and of the file's mutants come first. Then tests that execute the statement
        themselves, the cheap ones first, but of the cases of one parametrized test each further one counts as dearer:
        they mostly fail together. Then tests that share what others compute.
        """
        itself = self._itself(mutant, (TREE / mutant.file).read_text())
        numbers = sorted(numbers, key=lambda number: (self.seconds[number], number))
        cases, cost = Counter[str](), dict[int, float]()
        for number in numbers:
            function = self.tests[number].partition("[")[0]
            cases[function] += 1
            cost[number] = (self.seconds[number] + 0.02) * cases[function]
        best = [number for number in kills.best(mutant, self.tests) if number in cost][:6]
        rest = sorted(cost.keys() - set(best), key=lambda number: (number not in itself, cost[number], number))
        return [*best, *rest]

    def batches(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """The tests of each pytest session."""
        bounds, batch, total = iter(BATCHES), list[int](), 0.0
        bound = next(bounds)
        for number in numbers:
            batch.append(number)
            total += self.seconds[number]
            if total >= bound or len(batch) >= 150:
                yield batch
                batch, total, bound = [], 0.0, next(bounds, bound)
        if batch:
            yield batch


def add_functions(held: dict[str, Any], tree: Path) -> None:
    """Add to a map of lines which tests execute which functions: their names outlive edits of a file."""
    for file, entry in held["files"].items():
        entry["functions"] = {
            name: sorted({number for line in lines for number in entry["lines"].get(str(line), ())})
            for name, lines in functions_in((tree / file).read_bytes()).items()
        }


def merged(held: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    """A map with the tests of a later one, which replace those of the same names. Lines of edited files are dropped."""
    tests = list(dict.fromkeys([*held["tests"], *added["tests"]]))
    seconds = dict(zip(held["tests"], held["seconds"], strict=True))
    seconds |= dict(zip(added["tests"], added["seconds"], strict=True))
    numbers, again = {test: number for number, test in enumerate(tests)}, {*added["tests"]} - {BETWEEN}

    def table(of_file: str, kind: str) -> dict[str, list[int]]:
        found = dict[str, set[int]]()
        for one in (held, added):
            entry = one["files"].get(of_file)
            if entry is None or (kind == "lines" and entry["digest"] != added["files"][of_file]["digest"]):
                continue
            for key, executing in entry[kind].items():
                names = {one["tests"][number] for number in executing} - (again if one is held else set())
                found.setdefault(str(key), set()).update(numbers[name] for name in names)
        return {key: sorted(values) for key, values in found.items()}

    return {
        "tests": tests,
        "seconds": [seconds[test] for test in tests],
        "failed": sorted({*held["failed"]} - again | {*added["failed"]}),
        "files": {
            file: {"digest": entry["digest"], "lines": table(file, "lines"), "functions": table(file, "functions")}
            for file, entry in added["files"].items()
        },
    }


@cache
def _shares(file: Path) -> bool:
    """Whether a file of tests keeps results for further tests."""
    text = file.read_text() if file.is_file() else ""
    return any(
        word in text for word in ("@cache", "@lru_cache", 'scope="module"', 'scope="session"', "@functools.cache")
    )


class Kills:
    """Which tests have killed mutants of a function and of a file so far."""

    def __init__(self, results: Iterable[dict[str, Any]]) -> None:
        self._of = dict[str, Counter[str]]()
        for result in results:
            if result.get("how") == "failure":
                self.count(result["mutant"], result["by"])

    def count(self, name: str, test: str) -> None:
        """Count a kill."""
        file, function, *_ = name.split("::")
        for place in ("", file, f"{file}::{function}"):
            self._of.setdefault(place, Counter())[test] += 1

    def best(self, mutant: Mutant, tests: Sequence[str]) -> list[int]:
        """The numbers of some tests: the best of the function, then the best of the file and of all files."""
        file, function, *_ = mutant.name.split("::")
        places = ((f"{file}::{function}", 3), (file, 2), ("", 40))
        names = [test for place, many in places for test, _ in self._of.get(place, Counter()).most_common(many)]
        numbers = {test: number for number, test in enumerate(tests)}
        return [numbers[name] for name in dict.fromkeys(names) if name in numbers]
