"""Covering arrays: lists of cases in which every pair of values of two features occurs, unless it is refused.

A feature is a name with a list of values; its first value is the default. A case has a value of every feature. Nothing
lists which values fit together: `probe` runs a case up to the point where it would start, and returns the refusal or
the empty string. A refused case is reduced to the fewest values that are refused with everything else at its default,
and no later case contains these values together. A probe costs the construction of a run, so the generator first asks
about the refused sets and the cases of the last array, whose answers `answers` may compute in other processes.

The generator is greedy and deterministic (compare AETG, Cohen et al. 1997): a case begins with an uncovered pair; each
further feature, in random order, gets the value that covers most of the pairs that are still uncovered. Of several such
values, a feature whose values are `costly` takes its default.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from random import Random

Features = Mapping[str, tuple[str, ...]]
Case = dict[str, str]
Values = frozenset[tuple[str, str]]
"""(feature, value) of some features."""

ATTEMPTS = 60
"""Cases that are tried for a pair before it counts as not coverable."""


@dataclass
class Array:
    """The cases, and the sets of values that are refused together, each with its reason.

    `uncovered` are pairs that no accepted case contains although neither of them is refused alone: each of the tried
    cases contained a larger refused set.
    """

    cases: list[Case] = field(default_factory=list)
    refused: dict[Values, str] = field(default_factory=dict)
    uncovered: list[Values] = field(default_factory=list)


def pairs_of(case: Case) -> Iterator[Values]:
    """Every pair of a case's values."""
    return (frozenset(pair) for pair in combinations(case.items(), 2))


def all_pairs(features: Features) -> list[Values]:
    """Every pair of values of two features, in a fixed order."""
    return [
        frozenset(((one, a), (other, b)))
        for one, other in combinations(features, 2)
        for a in features[one]
        for b in features[other]
    ]


def default_case(features: Features) -> Case:
    return {name: values[0] for name, values in features.items()}


class Generator:
    """Makes an array; `allowed` says whether a case (perhaps of some features only) is small enough to run."""

    def __init__(
        self,
        features: Features,
        probe: Callable[[Case], str],
        allowed: Callable[[Case], bool],
        costly: Collection[str] = (),
        seed: int = 0,
        answers: Callable[[list[Case]], Iterable[str]] | None = None,
    ) -> None:
        self.features, self.probe, self.allowed, self.costly = features, probe, allowed, costly
        self.answers = answers or (lambda cases: map(probe, cases))
        self.random = Random(seed)
        self.array = Array()
        self._answers: dict[Values, str] = {}

    def make(self, kept: Iterable[Case] = (), refused: Iterable[Case] = ()) -> Array:
        """The array that covers all pairs. It begins with those of the `kept` cases that are still accepted.

        `refused` are sets of values that were refused before: the generator asks about them first.
        """
        defaults = default_case(self.features)
        alone = [{**defaults, name: value} for name, values in self.features.items() for value in values]
        sets = [{**defaults, **values} for values in refused if self._has(values)]
        for cases in (alone, [case for case in sets if self.allowed(case)]):
            self._ask(cases)
            for case in cases:
                self.accepted(case)
        uncovered = dict.fromkeys(all_pairs(self.features))
        fitting = [case for case in kept if self._fits(case)]
        self._ask(fitting)
        for case in filter(self.accepted, fitting):
            self._add(case, uncovered)
        while True:
            open_pairs = [pair for pair in uncovered if not self._is_refused(pair)]
            if not open_pairs:
                return self.array
            pair = self.random.choice(open_pairs)
            case = self._case_with(pair, uncovered)
            if case is None and self._is_refused(pair):
                continue
            if case is None:
                self.array.uncovered.append(pair)
                del uncovered[pair]
                continue
            self._add(case, uncovered)

    def _add(self, case: Case, uncovered: dict[Values, None]) -> None:
        self.array.cases.append(case)
        for covered in pairs_of(case):
            uncovered.pop(covered, None)

    def _has(self, values: Case) -> bool:
        """Whether the features have these values."""
        return all(value in self.features.get(name, ()) for name, value in values.items())

    def _fits(self, case: Case) -> bool:
        """Whether a case has a value of every feature, and is small enough; a known refused set is in none."""
        is_whole = case.keys() == self.features.keys() and self._has(case)
        return is_whole and self.allowed(case) and not self._is_refused(case.items())

    def accepted(self, case: Case) -> bool:
        """Whether a case is accepted; if not, the smallest refused part of it is recorded."""
        if not self._answer(case):
            return True
        if not self._is_refused(case.items()):
            self._record(case)
        return False

    def _ask(self, cases: list[Case]) -> None:
        """Get the answers for cases, all at a time."""
        self._answers.update(zip((frozenset(case.items()) for case in cases), self.answers(cases), strict=True))

    def _answer(self, case: Case) -> str:
        key = frozenset(case.items())
        if key not in self._answers:
            self._answers[key] = self.probe(case)
        return self._answers[key]

    def _record(self, case: Case) -> None:
        """Set value after value to its default while the case is still refused."""
        defaults = default_case(self.features)
        for name in self.random.sample(sorted(case), len(case)):
            reduced = {**case, name: defaults[name]}
            if reduced != case and self.allowed(reduced) and self._answer(reduced):
                case = reduced
        own = frozenset(item for item in case.items() if item[1] != defaults[item[0]])
        assert own, f"the default case is refused: {self._answer(case)}"
        self.array.refused[own] = self._answer(case)

    def _is_refused(self, values: Iterable[tuple[str, str]]) -> bool:
        values = set(values)
        return any(refused <= values for refused in self.array.refused)

    def _case_with(self, pair: Values, uncovered: Mapping[Values, None]) -> Case | None:
        for _ in range(ATTEMPTS):
            if self._is_refused(pair):
                return None
            case = self._grown(dict(sorted(pair)), uncovered)
            if case is not None and self.accepted(case):
                return {name: case[name] for name in self.features}
        return None

    def _grown(self, case: Case, uncovered: Mapping[Values, None]) -> Case | None:
        """The case with a value of every feature, none of whose known parts is refused; None if there is none left."""
        rest = [name for name in self.features if name not in case]
        self.random.shuffle(rest)
        for name in rest:
            fitting = [
                value
                for value in self.features[name]
                if self.allowed({**case, name: value}) and not self._is_refused({**case, name: value}.items())
            ]
            if not fitting:
                return None
            gains = {
                value: sum(frozenset((item, (name, value))) in uncovered for item in case.items()) for value in fitting
            }
            best = [value for value in fitting if gains[value] == max(gains.values())]
            case[name] = best[0] if name in self.costly else self.random.choice(best)
        return case
