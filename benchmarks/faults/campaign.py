"""Generated mutants of all that exchanges tensors between ranks, and which tests kill them.

    python benchmarks/faults/campaign.py list
    python benchmarks/faults/campaign.py record --map map.json --jobs 16
    python benchmarks/faults/campaign.py run --map map.json --out results.jsonl --jobs 14 --budget 500
    python benchmarks/faults/campaign.py table results.jsonl
    python benchmarks/faults/campaign.py keep results.jsonl
    python benchmarks/faults/campaign.py again --jobs 2

`mutants.py` makes the mutants of the tree that this file belongs to. `record` runs the quick tests once and writes
which tests execute which lines and functions of the mutated files; further tests are added to the same map. `run`
plants each mutant in a copy of the tree and runs the tests that execute the mutated statement, until one fails: first
those that have killed other mutants of the function and of the file, then the quickest. A test that fails without the
mutant, too, does not count. Each mutant appends a line of JSON to the file of `--out`.
`record` and `run` need no environment in the tree: `--python` names an interpreter with torch, pytest and pytest-xdist
that finds the metadata of mplug and its plugins. Linux only.
"""

import argparse
import json
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
from recorder import FILES
from records import (
    KILLED,
    KILLERS,
    SEED,
    SURVIVES,
    TREE,
    equivalents,
    read_results,
    recorded,
    sample,
    verdicts,
)
from run import map_of
from selection import Coverage, add_functions, merged
from slots import IGNORED, copied, environment_of, verify
from trials import Campaign, drive
from workspace import HERE, outcome_of

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
    """Run the quick tests once under the recorder; a map that exists keeps what it knows of other tests."""
    files = sorted({mutant.file for mutant in mutants_of(TREE)})
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        copy, lines, boot = copied(TREE, folder), folder / "lines", folder / "boot"
        lines.mkdir()
        boot.mkdir()
        (lines / FILES).write_text("\n".join(files))
        verify(options.python, copy)
        for source in ("plugin", "recorder"):
            (boot / f"mplug_faults_{source}.py").write_bytes((HERE / f"{source}.py").read_bytes())
        start = "import os\nif 'MPLUG_RECORD' in os.environ:\n    __import__('mplug_faults_recorder').boot()\n"
        (boot / "sitecustomize.py").write_text(start)
        report, output = folder / "report.jsonl", folder / "output.txt"
        variables = {"MPLUG_RECORD": str(lines), "MPLUG_RECORD_TREE": str(copy), "MPLUG_FAULTS_REPORT": str(report)}
        command = [options.python, "-m", "pytest", "-q", "-p", "mplug_faults_plugin", "-p", "no:cacheprovider"]
        command += ["-n", str(options.jobs), f"--basetemp={folder / 'tests'}", *IGNORED, *options.pytest]
        environment = environment_of(copy, [str(boot)]) | variables
        with output.open("w") as out, suppress(subprocess.TimeoutExpired):
            subprocess.run(command, cwd=copy, env=environment, stdout=out, stderr=out, timeout=options.budget)
        if not report.exists():
            sys.exit(f"no test has run\n{output.read_text(errors='replace')[-3000:]}")
        outcome = outcome_of(0, report, output.read_text(errors="replace"))
        print(outcome.output[-6000:])
        held = map_of(lines, copy, copy, files, outcome.seconds, [*outcome.failed, *outcome.unfinished])
        add_functions(held, copy)
    if options.map.exists():
        held = merged(json.loads(options.map.read_text()), held)
    options.map.write_text(json.dumps(held, separators=(",", ":")) + "\n")
    print(f"{len(held['tests'])} tests, {len(held['failed'])} of them failed -> {options.map}")


# run


def run(options: argparse.Namespace) -> None:
    """Plant each mutant in turn, and write which test kills it."""
    stop_at = time.monotonic() + options.budget
    mutants = _chosen(options)
    campaign = Campaign(options, mutants, Coverage.read(options.map))
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        verify(options.python, copied(TREE, Path(folder).resolve()))
        threads = [
            threading.Thread(target=drive, args=(campaign, Path(folder).resolve() / f"slot{number}", stop_at))
            for number in range(options.jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(counts(read_results(options.out), mutants))


def _chosen(options: argparse.Namespace) -> Sequence[Mutant]:
    left_out = set() if options.equivalent else equivalents()
    if options.undecided:
        left_out |= {mutant.name for mutant, _ in recorded()[0]}
    mutants = [mutant for mutant in mutants_of(TREE) if mutant.name not in left_out]
    if options.names:
        names = set(options.names.read_text().split())
        mutants = [mutant for mutant in mutants if mutant.name in names]
    mutants = interleaved([mutant for mutant in mutants if all(word in mutant.name for word in options.only)])
    part, of = options.slice
    return mutants[part::of][: options.sample]


def interleaved(mutants: Sequence[Mutant]) -> list[Mutant]:
    """Mutants in a random order with a fixed seed, in which files alternate: each has a first one before a second."""
    seen, ranked = Counter[str](), list[tuple[int, Mutant]]()
    for mutant in random.Random(SEED).sample(mutants, len(mutants)):
        seen[mutant.file] += 1
        ranked.append((seen[mutant.file], mutant))
    return [mutant for _, mutant in sorted(ranked, key=lambda one: one[0])]


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
    """Write the tests that kill the mutants of this tree to `killers.jsonl`."""
    outcomes = ("killed", "survived") if options.survivors else ("killed",)
    kept = {entry["mutant"]: entry for entry in read_results(KILLERS)}
    for path in options.results:
        for result in read_results(path):
            if result.get("outcome") in outcomes:
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
    added.add_argument("--undecided", action="store_true", help="only those without a record in killers.jsonl")
    added.add_argument("--slice", type=_part, default=(0, 1), metavar="I/N", help="one of N equal parts, from 0 on")
    added.add_argument("--equivalent", action="store_true", help="also those that equivalent.yaml lists")
    added.add_argument("--limit", type=float, default=120.0, help="seconds for a mutant (default: 120)")
    added.add_argument("--grace", type=float, default=15.0, help="seconds after which a test hangs, and beyond:")
    added.add_argument("--patience", type=float, default=5.0, help="multiple of its recorded seconds (default: 5)")
    for function in (table, keep):
        added = command(function)
        added.add_argument("results", type=Path, nargs="+")
        if function is keep:
            survivors = "also the mutants that survive all tests of the map: only if the map is of all quick tests"
            added.add_argument("--survivors", action="store_true", help=survivors)
    command(again, "tests", "only", "sample")
    return parser


def _part(word: str) -> tuple[int, int]:
    part, _, of = word.partition("/")
    if not (part.isdigit() and of.isdigit() and int(part) < int(of)):
        raise argparse.ArgumentTypeError(f"'{word}' is no part such as 0/2 or 1/2")
    return int(part), int(of)


def main() -> None:
    words = sys.argv[1:]
    border = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:border])
    options.pytest = words[border + 1 :]
    options.function(options)


if __name__ == "__main__":
    main()
