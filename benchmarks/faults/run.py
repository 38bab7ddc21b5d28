"""What test sets catch: plants faults one by one, and runs the tests that execute the faulty line.

    python benchmarks/faults/run.py check --tree OLD --tree NEW
    python benchmarks/faults/run.py record --tree OLD --out old.json -- -n 2
    python benchmarks/faults/run.py record --tree NEW --out quick.json -- -n 2
    python benchmarks/faults/run.py run --tree OLD --map old.json --out old.jsonl
    python benchmarks/faults/run.py run --tree NEW --map quick.json --out quick.jsonl
    python benchmarks/faults/run.py table old.jsonl quick.jsonl

`record` runs the tests once under coverage.py and writes which tests execute which lines. It needs `pip install
coverage` in the environment of this script; the tree's environment stays as it is. `fold` makes the same file of lines
that were recorded in another way. `run` plants each fault of `faults.yaml` in a copy of the tree, runs the tests that
execute the faulty statement with `-x`, the quickest first, and appends one line of JSON a fault. Faults that the file
holds already are skipped, so an interrupted run goes on. `table` compares two such files; its exit status is 1 if the
second set misses a fault that the first one caught.

A tree is a checkout with its own `.venv`, in which mplug and its plugins are installed editable. Linux only.
"""

import argparse
import json
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from recorder import FILES
from workspace import (
    HERE,
    Outcome,
    Place,
    Recorded,
    Workspace,
    digest,
    function_lines,
    place_of,
    whole_lines,
    workspace,
)

BATCHES = (20.0, 60.0, 240.0, 960.0)
"""Predicted seconds of tests in the first pytest sessions of a fault; further sessions are like the last of these."""
PATIENCE = 4.0
"""A test that takes this many times its recorded seconds, and `--grace` seconds more, hangs."""
UNKNOWN_SECONDS = 0.05
"""The prediction for a test whose duration was not recorded."""
BETWEEN = "collection"


@dataclass(frozen=True)
class Fault:
    """A mistake: `new` in place of `old`, which occurs once in `file`."""

    name: str
    area: str
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Coverage(Recorded):
    """Which tests execute which lines of the faulty files."""

    def executing(self, fault: Fault, source: str) -> list[str]:
        """The tests that execute the faulty statement, the quickest first.

        A statement that runs at import has effects on tests that do not execute it: then, the tests that execute any
        function of the file. The same where no test executes the statement by itself. Nothing is recorded of what
        Numba has compiled: where no test is found, all tests of the file's package.
        """
        place, lines = place_of(source, fault.old), self.files.get(fault.file, {"lines": {}})["lines"]
        found = set[int]() if place.at_import else self._of(lines, place)
        if not found and (place.at_import or self._between(lines, place)):
            found = self._of(lines, Place(function_lines(source), False))
        if not found:
            package = fault.file.partition("src/")[0]
            found = {number for number, test in enumerate(self.tests) if package and test.startswith(package)}
        passing = (number for number in found if self.tests[number] not in self.failed)
        return [self.tests[number] for number in sorted(passing, key=lambda number: (self.seconds[number], number))]

    def _of(self, lines: dict[str, list[int]], place: Place) -> set[int]:
        executed = {number for line in place.lines for number in lines.get(str(line), ())}
        return {number for number in executed if self.tests[number] != BETWEEN}

    def _between(self, lines: dict[str, list[int]], place: Place) -> bool:
        return any(lines.get(str(line)) for line in place.lines)

    def batches(self, tests: Iterable[str]) -> Iterator[tuple[list[str], float]]:
        """(tests, the recorded seconds of the slowest) of each pytest session."""
        seconds_of = dict(zip(self.tests, self.seconds, strict=True))
        bounds, batch, total = iter(BATCHES), list[str](), 0.0
        bound = next(bounds)
        for test in tests:
            batch.append(test)
            total += seconds_of[test]
            if total >= bound:
                yield batch, seconds_of[test]
                batch, total, bound = [], 0.0, next(bounds, bound)
        if batch:
            yield batch, seconds_of[batch[-1]]


def read_faults(path: Path, only: list[str]) -> list[Fault]:
    """The faults of a file, or those whose names hold one of the words."""
    faults = [Fault(**entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8"))]
    names = [fault.name for fault in faults]
    if len(set(names)) < len(names):
        sys.exit(f"'{path}' has a name twice: {next(name for name in names if names.count(name) > 1)}")
    chosen = [fault for fault in faults if not only or any(word in fault.name for word in only)]
    if only and not chosen:
        print(f"--only: no fault of '{path}' has a name with {' or '.join(map(repr, only))}", file=sys.stderr)
        sys.exit(2)
    return chosen


# check


def check(options: argparse.Namespace) -> None:
    """Prove that every fault can be planted in every tree, and leaves valid Python."""
    wrong = 0
    faults = read_faults(options.faults, [])
    for tree in options.tree:
        for fault in faults:
            path = tree / fault.file
            text = path.read_text() if path.is_file() else ""
            reason = "" if text.count(fault.old) == 1 else f"its text occurs {text.count(fault.old)} times"
            reason = reason or _syntax_error(text.replace(fault.old, fault.new))
            if reason:
                wrong += 1
                print(f"{path}: {fault.name}: {reason}")
    print(f"{len(faults)} faults in {len({fault.file for fault in faults})} files, {wrong} of them wrong")
    sys.exit(1 if wrong else 0)


def _syntax_error(source: str) -> str:
    try:
        compile(source, "fault", "exec")
    except SyntaxError as error:
        return f"it is no Python: {error}"
    return ""


# record


def record(options: argparse.Namespace) -> None:
    """Run the tests of a tree once under the recorder."""
    with workspace(options.tree, recorded=True) as work:
        files, lines = sorted({fault.file for fault in read_faults(options.faults, [])}), work.folder / "lines"
        lines.mkdir()
        (lines / FILES).write_text("\n".join(files))
        variables = {"MPLUG_RECORD": str(lines), "MPLUG_RECORD_TREE": str(work.copy)}
        outcome = work.pytest("-q", *options.pytest, environment=variables)
        print(outcome.output[-2000:])
        _write_map(options, lines, work.copy, work.copy, files, outcome.seconds, outcome.failed)


def fold(options: argparse.Namespace) -> None:
    """Make a map of recorded lines, and of pytest's output with `--durations=0` and a short summary."""
    text = options.log.read_text(errors="replace")
    seconds = dict[str, float]()
    for number, test in re.findall(r"^ *([\d.]+)s (?:setup|call|teardown) +(.*)$", text, re.MULTILINE):
        seconds[test] = seconds.get(test, 0.0) + float(number)
    failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", text, re.MULTILINE)
    files = sorted({fault.file for fault in read_faults(options.faults, [])})
    _write_map(options, options.lines, options.recorded_tree or options.tree, options.tree, files, seconds, failed)


def _write_map(
    options: argparse.Namespace,
    folder: Path,
    recorded_tree: Path,
    sources: Path,
    files: list[str],
    seconds: dict[str, float],
    failed: Iterable[str],
) -> None:
    held = map_of(folder, recorded_tree, sources, files, seconds, failed)
    options.out.write_text(json.dumps(held, separators=(",", ":")) + "\n")
    print(f"{len(held['tests'])} tests execute lines of {len(held['files'])} files -> {options.out}")


def map_of(
    folder: Path,
    recorded_tree: Path,
    sources: Path,
    files: list[str],
    seconds: dict[str, float],
    failed: Iterable[str],
) -> dict[str, Any]:
    """Which tests execute which lines of `files`, from the lines that were recorded in a folder."""
    names = {str(recorded_tree / file): file for file in files}
    tests = {test: number for number, test in enumerate(sorted(seconds))}
    found = dict[str, dict[int, set[int]]]()
    for path in sorted(folder.glob("*.jsonl")):
        for entry in whole_lines(path):
            test = tests.setdefault(entry["test"] or BETWEEN, len(tests))
            for name, lines in entry["lines"].items():
                if name in names:
                    of_file = found.setdefault(names[name], {})
                    for line in lines:
                        of_file.setdefault(line, set()).add(test)
    return {
        "tests": list(tests),
        "seconds": [round(seconds.get(test, UNKNOWN_SECONDS), 3) for test in tests],
        "failed": sorted(set(failed)),
        "files": {
            file: {
                "digest": digest(sources / file),
                "lines": {str(line): sorted(numbers) for line, numbers in sorted(found.get(file, {}).items())},
            }
            for file in files
            if (sources / file).is_file()
        },
    }


# run


def run(options: argparse.Namespace) -> None:
    """Plant each fault in turn, and write which test catches it; then confirm that these tests pass without a fault."""
    coverage, faults = Coverage.read(options.map), read_faults(options.faults, options.only)
    for fault in faults:
        recorded = coverage.files.get(fault.file)
        if recorded is not None and recorded["digest"] != digest(options.tree / fault.file):
            sys.exit(f"'{fault.file}' has changed since '{options.map}' was recorded; record again")
    unsound = set[str]()
    with workspace(options.tree) as work:
        while True:
            done = {result["fault"] for result in read_results(options.out)}
            left = [fault for fault in faults if fault.name not in done]
            print(f"{len(faults)} faults, {len(faults) - len(left)} of them done", flush=True)
            for fault in left:
                _append(options.out, _tried(work, fault, coverage, unsound, options))
            unsound |= _confirm(work, options)
            if not left:
                return


def read_results(path: Path) -> list[dict[str, Any]]:
    """The results that a file holds so far."""
    return list(whole_lines(path)) if path.exists() else []


def _append(path: Path, result: dict[str, Any]) -> None:
    with path.open("a") as out:
        out.write(json.dumps(result) + "\n")
    print(f"{result['outcome']:13} {result['seconds']:6.1f} s  {result['fault']}", flush=True)
    if "by" in result:
        print(f"{'':24}by {result['by']}", flush=True)


def _tried(
    work: Workspace, fault: Fault, coverage: Coverage, unsound: set[str], options: argparse.Namespace
) -> dict[str, Any]:
    """What becomes of a fault: outcome, seconds, and the test that caught it. `unsound` tests are left out."""
    began, source = time.monotonic(), (options.tree / fault.file).read_text()

    def result(outcome: str, **facts: Any) -> dict[str, Any]:
        seconds = round(time.monotonic() - began, 1)
        return {"fault": fault.name, "area": fault.area, "outcome": outcome, "seconds": seconds, **facts}

    if _syntax_error(source.replace(fault.old, fault.new)):
        return result("syntax error")
    tests = [test for test in coverage.executing(fault, source) if test not in unsound]
    if not tests:
        return result("not executed")
    num_run = 0
    for number, (batch, slowest) in enumerate(coverage.batches(tests)):
        if time.monotonic() - began > options.limit:
            return result("unfinished", num_tests=len(tests), num_run=num_run)
        with work.planted(fault.file, fault.old, fault.new):
            # Workers cost the start of two more processes, which is more than the first, short batch takes.
            outcome = _session(work, batch, slowest, options.workers if number else 0, options)
        how, by = _catch(outcome)
        if how == "error":
            _refuse_what_cannot_be_collected(work, batch, options)
        if by is not None:
            facts = {"num_tests": len(tests), "num_run": num_run + len(outcome.seconds)}
            return result("caught", how=how, by=by, **facts, said=_last_words(outcome))
        num_run += len(batch)
    return result("missed", num_tests=len(tests), num_run=num_run)


def _confirm(work: Workspace, options: argparse.Namespace) -> set[str]:
    """Run all tests that have caught a fault where nothing is planted; drop the results of those that fail."""
    results = read_results(options.out)
    tests = {
        result["by"]
        for result in results
        if result.get("how") == "failure" and "::" in result["by"] and "sound" not in result
    }
    if not tests:
        return set()
    arguments = [*options.pytest, f"@{_listed(work, sorted(tests))}"]
    outcome = work.pytest("-q", "-n", str(options.workers), *arguments)
    if not tests <= outcome.seconds.keys():
        sys.exit(f"tests that caught faults cannot be run without them\n{outcome.output[-3000:]}")
    failed = tests.intersection(outcome.failed)
    for test in sorted(failed):
        print(f"{'':24}fails without a fault, too: {test}", flush=True)
    sound = [
        one | ({"sound": True} if one.get("by") in tests else {}) for one in results if one.get("by") not in failed
    ]
    aside = options.out.with_name(f"{options.out.name}.tmp")
    aside.write_text("".join(json.dumps(one) + "\n" for one in sound))
    aside.replace(options.out)
    return failed


SESSION = "the session"
"""What catches a fault with which pytest ends before any test does."""


def _session(work: Workspace, tests: list[str], slowest: float, workers: int, options: argparse.Namespace) -> Outcome:
    arguments = ("-x", "-q", "-n", str(workers), *options.pytest, f"@{_listed(work, tests)}")
    return work.pytest(*arguments, patience=options.grace + PATIENCE * slowest)


def _listed(work: Workspace, tests: list[str]) -> Path:
    """A file of arguments for pytest: a command line is too short for thousands of tests."""
    path = work.folder / "arguments.txt"
    path.write_text("".join(f"{test}\n" for test in tests))
    return path


def _catch(outcome: Outcome) -> tuple[str, str | None]:
    """(how, the test) of a session that catches the fault; the test is None where it does not."""
    if outcome.failed:
        return "failure", outcome.failed[0]
    if outcome.status is None:
        return "time-out", next(iter(outcome.unfinished), SESSION)
    return ("", None) if outcome.status in (0, 5) else ("error", SESSION)


def _refuse_what_cannot_be_collected(work: Workspace, tests: list[str], options: argparse.Namespace) -> None:
    """A session that ends before its tests says nothing of a fault if it does so without one, too."""
    arguments = ("-q", "--collect-only", *options.pytest, f"@{_listed(work, tests)}")
    collected = work.pytest(*arguments)
    if collected.status != 0:
        sys.exit(f"tests of the map cannot be collected; record again\n{collected.output[-3000:]}")


def _last_words(outcome: Outcome) -> str:
    """The first line in which pytest says what is wrong."""
    errors = [line[1:].strip() for line in outcome.output.splitlines() if line.startswith("E  ")]
    return errors[0][:300] if errors else outcome.output[-300:]


# table


def table(options: argparse.Namespace) -> None:
    """Two results beside each other, in Markdown."""
    old, new = ({result["fault"]: result for result in read_results(path)} for path in (options.old, options.new))
    names = [*old, *(name for name in new if name not in old)]
    print("| fault | area | old set | quick set |\n|---|---|---|---|")
    for name in names:
        area = (old.get(name) or new[name])["area"]
        print(f"| {name} | {area} | {_cell(old.get(name))} | {_cell(new.get(name))} |")
    totals = [f"{_count(results, 'caught')} of {len(results)} caught" for results in (old, new)]
    print(f"| **{len(names)} faults** | | **{totals[0]}** | **{totals[1]}** |")
    missed = [name for name in names if _caught(old.get(name)) and not _caught(new.get(name))]
    print(f"\nCaught by the old set and not by the quick set: {len(missed)}")
    for name in missed:
        print(f"- {name}")
    sys.exit(1 if missed else 0)


def _caught(result: dict[str, Any] | None) -> bool:
    return result is not None and result["outcome"] == "caught"


def _count(results: dict[str, dict[str, Any]], outcome: str) -> int:
    return sum(result["outcome"] == outcome for result in results.values())


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    if result["outcome"] == "caught":
        file, _, name = result["by"].partition("::")
        test = "::".join(filter(None, (Path(file).name, name))).replace("|", "\\|")
        how = "" if result["how"] == "failure" else f" ({result['how']})"
        return f"caught by `{test}`{how}, {result['seconds']:.0f} s"
    if result["outcome"] in ("missed", "unfinished"):
        return f"{result['outcome']} ({result['num_run']} of {result['num_tests']} tests)"
    return str(result["outcome"])


# The command line.


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # blocks are left, and with them the copy


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(function: Any) -> argparse.ArgumentParser:
        added = commands.add_parser(function.__name__, help=function.__doc__, description=function.__doc__)
        added.set_defaults(function=function)
        if function is not table:
            added.add_argument("--faults", type=Path, default=HERE / "faults.yaml", help="the file of faults")
        return added

    of_tree = {"type": lambda text: Path(text).resolve(), "required": True, "metavar": "DIR"}
    added = command(check)
    added.add_argument("--tree", action="append", help="a checkout; may be given more than once", **of_tree)
    added = command(record)
    added.add_argument("--tree", help="a checkout with a .venv", **of_tree)
    added.add_argument("--out", type=Path, required=True, metavar="MAP", help="the file to write")
    added = command(fold)
    added.add_argument("--tree", help="the checkout whose tests were recorded", **of_tree)
    added.add_argument("--lines", type=Path, required=True, metavar="DIR", help="the folder of recorded *.jsonl")
    added.add_argument("--log", type=Path, required=True, help="pytest's output with --durations=0 and -rfE")
    added.add_argument("--recorded-tree", type=Path, metavar="DIR", help="the folder in the recorded names, if another")
    added.add_argument("--out", type=Path, required=True, metavar="MAP", help="the file to write")
    added = command(run)
    added.add_argument("--tree", help="a checkout with a .venv", **of_tree)
    added.add_argument("--map", type=Path, required=True, help="what 'record' or 'fold' has written for the tree")
    added.add_argument("--out", type=Path, required=True, metavar="RESULTS", help="results, a line of JSON a fault")
    added.add_argument("--only", action="append", default=[], metavar="WORDS", help="faults whose names hold the words")
    added.add_argument("--workers", type=int, default=2, help="pytest's processes (default: 2)")
    added.add_argument(
        "--limit", type=float, default=3600.0, help="seconds for a fault, after which no further session begins"
    )
    added.add_argument(
        "--grace",
        type=float,
        default=180.0,
        help=f"seconds without progress, beyond {PATIENCE:g} times the slowest test, after which a session hangs",
    )
    added = command(table)
    added.add_argument("old", type=Path)
    added.add_argument("new", type=Path)
    return parser


def main() -> None:
    words = sys.argv[1:]
    border = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:border])
    options.pytest = words[border + 1 :]
    signal.signal(signal.SIGTERM, _end)
    options.function(options)


if __name__ == "__main__":
    main()
