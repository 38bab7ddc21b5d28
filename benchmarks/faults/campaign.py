"""Generated mutants of all that exchanges tensors between ranks, and which tests kill them.

    python benchmarks/faults/campaign.py list
    python benchmarks/faults/campaign.py record --map map.json --jobs 16
    python benchmarks/faults/campaign.py run --map map.json --out results.jsonl --jobs 14 --budget 500
    python benchmarks/faults/campaign.py table results.jsonl
    python benchmarks/faults/campaign.py keep results.jsonl
    python benchmarks/faults/campaign.py again --jobs 2

`mutants.py` makes the mutants of the tree that this file belongs to. `record` runs the quick tests once and writes
which tests execute which lines of the mutated files. `run` plants each mutant in a copy of the tree and runs the tests
that execute the mutated statement, until one fails: first those that have killed other mutants of the function and of
the file, then the quickest. A test that fails without the mutant, too, does not count. Each mutant appends a line of
JSON; `run` goes on where it was stopped. `table` counts, `keep` writes the killers to `killers.jsonl`, and `again` runs
each killer for its mutant.

`record` and `run` need no environment in the tree: `--python` names an interpreter with torch, pytest and pytest-xdist
that finds the metadata of mplug and its plugins. Linux only.
"""

import argparse
import json
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mutants import Mutant, mutants_of
from records import (
    KILLED,
    KILLERS,
    SEED,
    SESSION,
    SURVIVES,
    TREE,
    caught,
    equivalents,
    read_results,
    recorded,
    sample,
    verdicts,
)
from run import map_of
from selection import Coverage, Kills
from slots import Slot, Stopped, copied, environment_of, verify
from workspace import HERE, Outcome, digest, outcome_of

SETTLED = ("killed", "survived", "not executed")


# list


def list_(options: argparse.Namespace) -> None:
    """Print the mutants."""
    mutants = mutants_of(TREE)
    for mutant in mutants:
        if all(word in mutant.name for word in options.only):
            print(f"{mutant.name}\n    {mutant.change}")
    print(f"{len(mutants)} mutants: {dict(Counter(mutant.operator for mutant in mutants))}")


# record


def record(options: argparse.Namespace) -> None:
    """Run the quick tests once under the recorder."""
    files = sorted({mutant.file for mutant in mutants_of(TREE)})
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        copy, lines, boot = copied(TREE, folder), folder / "lines", folder / "boot"
        lines.mkdir()
        boot.mkdir()
        verify(options.python, copy)
        for source in ("plugin", "recorder"):
            (boot / f"mplug_faults_{source}.py").write_bytes((HERE / f"{source}.py").read_bytes())
        start = "import os\nif 'MPLUG_RECORD' in os.environ:\n    __import__('mplug_faults_recorder').boot()\n"
        (boot / "sitecustomize.py").write_text(start)
        report, output = folder / "report.jsonl", folder / "output.txt"
        variables = {"MPLUG_RECORD": str(lines), "MPLUG_RECORD_TREE": str(copy), "MPLUG_FAULTS_REPORT": str(report)}
        command = [options.python, "-m", "pytest", "-q", "-p", "mplug_faults_plugin", "-p", "no:cacheprovider"]
        command += ["-n", str(options.jobs), f"--basetemp={folder / 'tests'}", *options.pytest]
        environment = environment_of(copy, [str(boot)]) | variables
        with output.open("w") as out, suppress(subprocess.TimeoutExpired):
            subprocess.run(command, cwd=copy, env=environment, stdout=out, stderr=out, timeout=options.budget)
        if not report.exists():
            sys.exit(f"no test has run\n{output.read_text(errors='replace')[-3000:]}")
        outcome = outcome_of(0, report, output.read_text(errors="replace"))
        print(outcome.output[-6000:])
        held = map_of(lines, copy, copy, files, outcome.seconds, [*outcome.failed, *outcome.unfinished])
    options.map.write_text(json.dumps(held, separators=(",", ":")) + "\n")
    print(f"{len(held['tests'])} tests, {len(held['failed'])} of them failed -> {options.map}")


# run


class Campaign:
    """The mutants still to try, shared by the threads that drive the slots."""

    def __init__(self, options: argparse.Namespace, mutants: Sequence[Mutant], coverage: Coverage) -> None:
        self.options, self.coverage = options, coverage
        results = read_results(options.out)
        self.last = {result["mutant"]: result for result in results if "mutant" in result}
        self.kills = Kills(self.last.values())
        self.sound = {result["test"]: result["sound"] for result in results if "test" in result}
        self.lock = threading.Lock()
        self.waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
        self.number = 0
        left = [mutant for mutant in mutants if self.last.get(mutant.name, {}).get("outcome") not in SETTLED]
        random.Random(SEED).shuffle(left)
        for mutant in sorted(left, key=lambda mutant: mutant.name in self.last):  # the difficult ones come last
            self.waiting.put(mutant)
        print(f"{len(mutants)} mutants, {len(left)} of them to try", flush=True)

    def append(self, **result: Any) -> None:
        """Write a line of results."""
        with self.lock:
            with self.options.out.open("a") as out:
                out.write(json.dumps(result) + "\n")
            if "mutant" in result:
                self.number += 1
                if result.get("how") == "failure":
                    self.kills.count(result["mutant"], result["by"])
                shown = f"{result['outcome']:12} {result['seconds']:6.1f} s  {result['mutant']}"
                print(f"{self.number:5} {shown}  {result.get('by', '')}", flush=True)
            else:
                self.sound[result["test"]] = result["sound"]
                if not result["sound"]:
                    print(f"{'':6}fails without a mutant, too: {result['test']}", flush=True)


def run(options: argparse.Namespace) -> None:
    """Plant each mutant in turn, and write which test kills it."""
    stop_at = time.monotonic() + options.budget
    coverage, mutants = Coverage.read(options.map), _chosen(options)
    for file in sorted({mutant.file for mutant in mutants} & coverage.files.keys()):
        if coverage.files[file]["digest"] != digest(TREE / file):
            sys.exit(f"'{file}' has changed since '{options.map}' was recorded; record again")
    campaign = Campaign(options, mutants, coverage)
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        verify(options.python, copied(TREE, Path(folder).resolve()))
        threads = [
            threading.Thread(target=_drive, args=(campaign, Path(folder).resolve() / f"slot{number}", stop_at))
            for number in range(options.jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(counts(read_results(options.out), mutants))


def _chosen(options: argparse.Namespace) -> Sequence[Mutant]:
    listed = set() if options.equivalent else equivalents()
    mutants = [mutant for mutant in mutants_of(TREE) if mutant.name not in listed]
    if options.names:
        names = set(options.names.read_text().split())
        mutants = [mutant for mutant in mutants if mutant.name in names]
    mutants = [mutant for mutant in mutants if all(word in mutant.name for word in options.only)]
    return mutants if options.sample is None else random.Random(SEED).sample(mutants, options.sample)


def _drive(campaign: Campaign, folder: Path, stop_at: float) -> None:
    """Try mutants in one slot until none is left, or the time is over."""
    options, attempt, slot = campaign.options, 0, None
    try:
        while time.monotonic() < stop_at:
            try:
                mutant = campaign.waiting.get_nowait()
            except queue.Empty:
                return
            try:
                slot = slot or Slot(TREE, folder.with_name(f"{folder.name}-{attempt}"), options.python, stop_at)
                Trial(slot, mutant, campaign).run()
            except Stopped:
                return
            except Exception as error:  # a mutant can damage a slot: the next one gets a new one
                campaign.append(mutant=mutant.name, outcome="broken", seconds=0.0, said=repr(error)[-500:])
                if slot is not None:
                    slot.close()
                attempt, slot = attempt + 1, None
    finally:
        if slot is not None:
            slot.close()


class Trial:
    """One mutant in one slot."""

    def __init__(self, slot: Slot, mutant: Mutant, campaign: Campaign) -> None:
        self.slot, self.mutant, self.campaign = slot, mutant, campaign
        self.options, self.coverage = campaign.options, campaign.coverage
        self.source = (TREE / mutant.file).read_bytes()
        self.passed: list[int] = list(campaign.last.get(mutant.name, {}).get("passed", ()))
        self.began = time.monotonic()

    def run(self) -> None:
        """Run tests until one kills the mutant, none is left, or the mutant's time is over; write the result."""
        executing = self.coverage.executing(self.mutant, self.source.decode())
        if not executing:
            return self._write("not executed")
        left = set(executing) - set(self.passed)
        try:
            while left and time.monotonic() - self.began < self.options.limit:
                order = self.coverage.ordered(self._sound(left), self.campaign.kills, self.mutant)
                batch = next(self.coverage.batches(order), [])
                if not batch:
                    break
                if self._killed(batch):
                    return None
                left -= {*batch}
        except Stopped:
            self._write("unfinished", num_tests=len(executing), passed=self.passed)
            raise
        outcome = "unfinished" if self._sound(left) else "survived"
        return self._write(outcome, num_tests=len(executing), passed=self.passed)

    def _sound(self, numbers: Iterable[int]) -> set[int]:
        return {number for number in numbers if self.campaign.sound.get(self.coverage.tests[number], True)}

    def _killed(self, batch: list[int]) -> bool:
        """Run tests; whether one has killed the mutant. Those that pass are noted."""
        left = list(batch)
        while left:
            tests = [self.coverage.tests[number] for number in left]
            slowest = max(self.coverage.seconds[number] for number in left)
            outcome = self._with_mutant(tests, slowest)
            how, by = caught(outcome)
            if by is None:
                self.passed += left
                return False
            if self._stands_without(by, tests) and self._fails_alone(how, by, tests):
                said = _last_words(outcome) if how != "time-out" else ""
                self._write("killed", how=how, by=by, said=said)
                return True
            done = {number for number in left if self.coverage.tests[number] in outcome.seconds}
            if how == "error" or not done:
                return False
            self.passed += [number for number in done if self.coverage.tests[number] != by]
            left = [number for number in left if number not in done]
        return False

    def _with_mutant(self, tests: Sequence[str], slowest: float) -> Outcome:
        self.slot.put(self.mutant.file, self.mutant.applied(self.source))
        try:
            return self._session(tests, slowest)
        finally:
            self.slot.put(self.mutant.file, self.source)

    def _fails_alone(self, how: str, by: str, tests: Sequence[str]) -> bool:
        """Whether a test that has failed after others fails with the mutant alone, too: others may disturb it."""
        if how != "failure" or "::" not in by or by == tests[0]:
            return True
        number = self.coverage.tests.index(by) if by in self.coverage.tests else None
        seconds = 30.0 if number is None else self.coverage.seconds[number]
        return caught(self._with_mutant([by], seconds))[1] is not None

    def _session(self, tests: Sequence[str], slowest: float) -> Outcome:
        listed = self.slot.folder / "arguments.txt"
        listed.write_text("".join(f"{test}\n" for test in tests))
        patience = self.options.grace + self.options.patience * slowest
        return self.slot.pytest("-x", "-q", *self.options.pytest, f"@{listed}", patience=patience)

    def _stands_without(self, by: str, tests: Sequence[str]) -> bool:
        """Whether the test that has failed passes without the mutant. Of a session, whether its tests are collected."""
        if by == SESSION:
            outcome = self.slot.pytest("-q", "--collect-only", *self.options.pytest, *dict.fromkeys(tests))
            return outcome.status == 0
        if by not in self.campaign.sound:
            known = {test: self.coverage.seconds[number] for number, test in enumerate(self.coverage.tests)}
            outcome = self._session([by], known.get(by, 30.0)) if "::" in by else self._collected(by)
            self.campaign.append(test=by, sound=outcome.status == 0)
        return bool(self.campaign.sound[by])

    def _collected(self, file: str) -> Outcome:
        return self.slot.pytest("-q", "--collect-only", *self.options.pytest, file)

    def _write(self, outcome: str, **facts: Any) -> None:
        seconds = round(time.monotonic() - self.began, 1)
        self.campaign.append(
            mutant=self.mutant.name, change=self.mutant.change, outcome=outcome, seconds=seconds, **facts
        )


def _last_words(outcome: Outcome) -> str:
    errors = [line[1:].strip() for line in outcome.output.splitlines() if line.startswith("E  ")]
    return errors[0][:160] if errors else outcome.output[-160:]


# table and keep


def counts(results: Iterable[dict[str, Any]], mutants: Sequence[Mutant]) -> str:
    """How many mutants have which outcome."""
    last = {result["mutant"]: result for result in results if "mutant" in result}
    found = Counter(last.get(mutant.name, {"outcome": "not tried"})["outcome"] for mutant in mutants)
    return f"{len(mutants)} mutants: " + ", ".join(f"{number} {outcome}" for outcome, number in sorted(found.items()))


def table(options: argparse.Namespace) -> None:
    """Count outcomes by operator and folder, and list the mutants that no test kills."""
    results = [result for path in options.results for result in read_results(path)]
    last = {result["mutant"]: result for result in results if "mutant" in result}
    listed, mutants = equivalents(), mutants_of(TREE)
    rows: dict[str, Counter[str]] = {}
    for mutant in mutants:
        outcome = "equivalent" if mutant.name in listed else last.get(mutant.name, {}).get("outcome", "not tried")
        for row in (mutant.operator, str(Path(mutant.file).parent), "all"):
            rows.setdefault(row, Counter())[outcome] += 1
    columns = sorted({outcome for row in rows.values() for outcome in row})
    print(f"| | {' | '.join(['made', *columns])} |\n|---|{'---|' * (len(columns) + 1)}")
    for row, found in sorted(rows.items(), key=lambda one: (one[0] == "all", "/" in one[0], one[0])):
        print(f"| {row} | {' | '.join(str(number) for number in (found.total(), *(found[one] for one in columns)))} |")
    for mutant in mutants:
        result = last.get(mutant.name)
        if mutant.name not in listed and result and result["outcome"] != "killed":
            tests = f"{len(result.get('passed', ()))} of {result.get('num_tests', 0)} tests"
            print(f"- {result['outcome']}: {mutant.name} ({tests})\n      {mutant.change}")


def keep(options: argparse.Namespace) -> None:
    """Write the tests that kill the mutants of this tree, and the mutants that survive, to `killers.jsonl`."""
    kept = {entry["mutant"]: entry for entry in read_results(KILLERS)}
    for path in options.results:
        for result in read_results(path):
            if result.get("outcome") in ("killed", "survived"):
                facts = {"how": "survives", "by": ""} | result
                kept[result["mutant"]] = {key: facts[key] for key in ("mutant", "change", "how", "by", "seconds")}
    changes = {mutant.name: mutant.change for mutant in mutants_of(TREE)}
    lines = [json.dumps(entry) for name, entry in sorted(kept.items()) if changes.get(name) == entry["change"]]
    KILLERS.write_text("".join(f"{line}\n" for line in lines))
    print(f"{len(lines)} of {len(changes)} mutants -> {KILLERS}")


# again


def again(options: argparse.Namespace) -> None:
    """Run each recorded killer for its mutant; the exit status is 1 if one passes."""
    current, stale = recorded()
    chosen = sample(current, options.sample) if options.sample is not None else current
    chosen = [(mutant, entry) for mutant, entry in chosen if all(word in mutant.name for word in options.only)]
    found = verdicts(chosen, options.python, options.jobs, options.pytest)
    for name, said in sorted(found.items()):
        if said != KILLED:
            print(f"{said}: {name}")
    print(f"{len(chosen)} mutants: {dict(Counter(found.values()))}; {len(stale)} recorded mutants do not exist")
    sys.exit(1 if SURVIVES in found.values() else 0)


# The command line.


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(function: Callable[[argparse.Namespace], None], *kinds: str) -> argparse.ArgumentParser:
        added = commands.add_parser(function.__name__.rstrip("_"), help=function.__doc__, description=function.__doc__)
        added.set_defaults(function=function)
        if "tests" in kinds:
            added.add_argument("--python", default=sys.executable, help="the interpreter (default: this one)")
            added.add_argument("--jobs", type=int, default=2, help="processes at a time (default: 2)")
        if "map" in kinds:
            added.add_argument("--map", type=Path, required=True, help="the file of lines and tests")
            added.add_argument("--budget", type=float, default=86400.0, metavar="SECONDS", help="when to stop")
        if "only" in kinds:
            added.add_argument("--only", action="append", default=[], metavar="WORD", help="names that hold the word")
        if "sample" in kinds:
            added.add_argument("--sample", type=int, metavar="N", help="N mutants, the same ones in every run")
        return added

    command(list_, "only")
    command(record, "tests", "map")
    added = command(run, "tests", "map", "only", "sample")
    added.add_argument("--out", type=Path, required=True, metavar="RESULTS", help="results, a line of JSON a mutant")
    added.add_argument("--names", type=Path, metavar="FILE", help="only the mutants that the file names")
    added.add_argument("--equivalent", action="store_true", help="also those that equivalent.yaml lists")
    added.add_argument("--limit", type=float, default=120.0, help="seconds for a mutant (default: 120)")
    added.add_argument("--grace", type=float, default=15.0, help="seconds after which a test hangs, and beyond:")
    added.add_argument("--patience", type=float, default=5.0, help="multiple of its recorded seconds (default: 5)")
    for function in (table, keep):
        command(function).add_argument("results", type=Path, nargs="+")
    command(again, "tests", "only", "sample")
    return parser


def main() -> None:
    words = sys.argv[1:]
    border = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:border])
    options.pytest = words[border + 1 :]
    options.function(options)


if __name__ == "__main__":
    main()
