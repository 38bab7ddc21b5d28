"""Which tests a mutant is tried with, and in which order."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mutants import Mutant
from records import TREE
from run import BETWEEN
from workspace import Recorded, function_lines

BATCHES = (12.0, 30.0, 60.0)
"""Predicted seconds of tests in the first pytest sessions of a mutant; further sessions are like the last of these."""


@dataclass(frozen=True)
class Coverage(Recorded):
    """Which tests execute which lines of the mutated files."""

    def executing(self, mutant: Mutant, source: str) -> list[int]:
        """The numbers of the tests that execute the mutated statement.

        If it runs only while no test does (at an import, in a fixture of a session), those that execute the file.
        """
        lines = self.files.get(mutant.file, {"lines": {}})["lines"]
        found = {number for line in mutant.lines for number in lines.get(str(line), ())}
        if found and not self._tests(found):
            found = {number for line in function_lines(source) for number in lines.get(str(line), ())}
        return sorted(self._beside(self._tests(found), "@cache\n" in source))

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

        The best killers of the function's and of the file's mutants come first. Then cheap tests, but of the cases of
        one parametrized test each further one counts as dearer: they mostly fail together.
        """
        numbers = sorted(numbers, key=lambda number: (self.seconds[number], number))
        cases, cost = Counter[str](), dict[int, float]()
        for number in numbers:
            function = self.tests[number].partition("[")[0]
            cases[function] += 1
            cost[number] = (self.seconds[number] + 0.02) * cases[function]
        best = [number for number in kills.best(mutant, self.tests) if number in cost][:6]
        rest = sorted(cost.keys() - set(best), key=lambda number: (cost[number], number))
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
