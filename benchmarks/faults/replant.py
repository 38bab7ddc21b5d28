"""Plants the faults of `faults.yaml` again, many at a time, each with the tests that have caught it before.

    python benchmarks/faults/replant.py run --out results.jsonl --jobs 14 --budget 480
    python benchmarks/faults/replant.py run --out results.jsonl --only "ring shift"
    python benchmarks/faults/replant.py table results.jsonl
    python benchmarks/faults/replant.py keep results.jsonl

`run` plants every fault in a copy of the tree, and runs the quick tests that `catchers.jsonl` names for it; if none
fails, the quick tests of the area (`areas.yaml`); and if these pass, the tests of `catchers.jsonl` that are wide today.
What fails or hangs without the fault, too, does not count. Each fault appends a line of JSON to the file; faults that
it holds already are skipped, so a run that was stopped goes on. `table` prints what is known of each fault in Markdown,
and `keep` writes the tests that catch faults to `catchers.jsonl`. The exit status of `run` is 1 if a fault is caught by
no quick test.

`run.py` needs a record of which tests execute which lines, and tries all of these; this needs a few minutes on 16
cores. A copy has no environment: this interpreter must find torch, pytest, and the metadata of mplug and its plugins.
Linux only.
"""

import argparse
import json
import queue
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from records import SESSION, TREE, caught, read_results
from run import Fault, read_faults
from sessions import NOT_FOUND, PASSED, WIDE, files_of_tests, run_selected, run_tests
from slots import Slot, Stopped, copied, verify
from workspace import HERE, Outcome

FAULTS, CATCHERS, AREAS = HERE / "faults.yaml", HERE / "catchers.jsonl", HERE / "areas.yaml"
PATIENCE = 90.0
"""Seconds without progress after which a test hangs."""
BY_WIDE = "caught by a wide test alone"
AGAIN = 4
"""Sessions of an area: one more for each test that fails without the fault, too."""


class Planting:
    """The copies of the tree, and what is known of tests without a fault."""

    def __init__(self, out: Path, stop_at: float) -> None:
        self.out, self.stop_at = out, stop_at
        self.slots: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.sound: dict[str, bool] = {}
        self.catchers = {entry["fault"]: entry["tests"] for entry in read_results(CATCHERS)}
        self.areas: dict[str, list[str]] = yaml.safe_load(AREAS.read_text())

    def add_slot(self, folder: Path) -> None:
        """Copy the tree, and start the process that forks sessions in the copy."""
        self.slots.put(Slot(TREE, folder, stop_at=self.stop_at))

    def by_quick_catchers(self, fault: Fault) -> dict[str, Any] | None:
        """What the quick tests that have caught a fault before say of it; None if they pass, or if there is none."""
        return self._by_catchers(fault, is_wide=False)

    def by_wide_catchers(self, fault: Fault) -> dict[str, Any]:
        """The same of tests that are wide today."""
        return self._by_catchers(fault, is_wide=True) or self._written(fault, "missed", time.monotonic())

    def _by_catchers(self, fault: Fault, is_wide: bool) -> dict[str, Any] | None:
        tests, began = self.catchers.get(fault.name, []), time.monotonic()
        if not tests:
            return None
        with self.slot() as slot:
            with _planted(slot, fault):
                outcome = run_selected(slot, tests, WIDE if is_wide else (), PATIENCE)
            how, by = ("", None) if outcome.status == NOT_FOUND else caught(outcome)
            if by is None or not self._stands_without(slot, [by] if "::" in by else tests, is_wide):
                return None
            return self._written(fault, "caught", began, how=how, by=by, wide=is_wide, said=_last_words(outcome))

    def by_area(self, fault: Fault) -> dict[str, Any] | None:
        """What the quick tests of a fault's area say of it; None if they pass."""
        files, began = files_of_area(self.areas[fault.area]), time.monotonic()
        left_out: list[str] = []
        with self.slot() as slot:
            for _ in range(AGAIN):
                with _planted(slot, fault):
                    outcome = run_tests(slot, files, left_out, PATIENCE)
                how, by = caught(outcome)
                if by is None:
                    return None
                if self._stands_without(slot, [by] if "::" in by else files, False):
                    return self._written(fault, "caught", began, how=how, by=by, wide=False, said=_last_words(outcome))
                left_out += ["--deselect", by]
        return None

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """A slot that no other thread uses; a new one takes its place if a fault has damaged it."""
        slot = self.slots.get()
        try:
            yield slot
        except (RuntimeError, OSError):
            slot.close()
            slot = Slot(TREE, slot.folder.with_name(f"{slot.folder.name}-again"), stop_at=self.stop_at)
            raise
        finally:
            self.slots.put(slot)

    def _stands_without(self, slot: Slot, tests: Sequence[str], is_wide: bool) -> bool:
        """Whether tests pass where nothing is planted."""
        key = json.dumps(tests)
        if key not in self.sound:
            outcome = run_tests(slot, tests, WIDE if is_wide else (), PATIENCE)
            self.sound[key] = outcome.status in PASSED
            if not self.sound[key]:
                print(f"fails without a fault, too: {', '.join(tests)[:200]}", flush=True)
        return self.sound[key]

    def _written(self, fault: Fault, outcome: str, began: float, **facts: Any) -> dict[str, Any]:
        seconds = round(time.monotonic() - began, 1)
        result = {"fault": fault.name, "area": fault.area, "outcome": outcome, "seconds": seconds, **facts}
        with self.lock, self.out.open("a") as out:
            out.write(json.dumps(result) + "\n")
        wide = " (wide)" if result.get("wide") else ""
        print(f"{outcome:8}{seconds:6.1f} s  {fault.name}  {result.get('by', '')}{wide}", flush=True)
        return result


@contextmanager
def _planted(slot: Slot, fault: Fault) -> Iterator[None]:
    """Plant a fault in a slot for the duration of the block."""
    source = (TREE / fault.file).read_text()
    slot.put(fault.file, source.replace(fault.old, fault.new).encode())
    try:
        yield
    finally:
        slot.put(fault.file, source.encode())


def files_of_area(words: Iterable[str]) -> list[str]:
    """The files of tests for which words of `areas.yaml` stand, in the order of the words."""
    of_words = (path for word in words for path in files_of_tests(TREE) if word in _words_of(path.relative_to(TREE)))
    return [str(path.relative_to(TREE)) for path in dict.fromkeys(of_words)]


def _words_of(path: Path) -> set[str]:
    return {part.removeprefix("test_").removesuffix(".py") for part in path.parts}


def run(options: argparse.Namespace) -> None:
    """Plant each fault; print what happens to it, and at the end the faults that survive."""
    faults = read_faults(FAULTS, options.only)
    if unknown := {fault.area for fault in faults} - yaml.safe_load(AREAS.read_text()).keys():
        sys.exit(f"'{AREAS}' lacks the areas {sorted(unknown)}")
    planting = Planting(options.out, time.monotonic() + options.budget)
    done = {result["fault"] for result in read_results(options.out)}
    left = [fault for fault in faults if fault.name not in done]
    jobs = max(1, min(options.jobs, len(left)))
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        verify(sys.executable, copied(TREE, folder / "first"))
        with ThreadPoolExecutor(jobs) as pool:  # a slot's process ends with the thread that has started it
            [*pool.map(planting.add_slot, [folder / f"slot{number}" for number in range(jobs)])]
            for attempt in (planting.by_quick_catchers, planting.by_area, planting.by_wide_catchers):
                running = [(fault, pool.submit(attempt, fault)) for fault in left]
                left = [fault for fault, one in running if _passes(one)]
            for _ in range(jobs):
                planting.slots.get().close()
    _summarize(faults, options.out)


def _passes(running: "Future[dict[str, Any] | None]") -> bool:
    """Whether the tests of an attempt pass, so that the next ones are tried; not so if the time is over."""
    try:
        return running.result() is None
    except Stopped:
        return False
    except (RuntimeError, OSError) as error:
        print(f"a copy of the tree is damaged, and another one takes its place: {error!r}"[:500], flush=True)
        return False


def _summarize(faults: Sequence[Fault], out: Path) -> None:
    results = {result["fault"]: result for result in read_results(out)}
    found = Counter(_kind(results.get(fault.name)) for fault in faults)
    print(f"{len(faults)} faults: " + ", ".join(f"{number} {kind}" for kind, number in sorted(found.items())))
    for kind in (BY_WIDE, "survive", "not tried"):
        for fault in faults:
            if _kind(results.get(fault.name)) == kind:
                print(f"- {kind}: {fault.name} ({fault.file})")
    sys.exit(1 if found["survive"] or found[BY_WIDE] else 0)


def _kind(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not tried"
    if result["outcome"] != "caught":
        return "survive"
    return BY_WIDE if result["wide"] else "caught"


def _last_words(outcome: Outcome) -> str:
    errors = [line[1:].strip() for line in outcome.output.splitlines() if line.startswith("E  ")]
    return errors[0][:200] if errors else outcome.output[-200:]


def table(options: argparse.Namespace) -> None:
    """Print which test catches each fault, in Markdown."""
    results = {result["fault"]: result for path in options.results for result in read_results(path)}
    faults = read_faults(FAULTS, [])
    print("| fault | area | caught by |\n|---|---|---|")
    for fault in faults:
        print(f"| {fault.name} | {fault.area} | {_cell(results.get(fault.name))} |")
    print(f"\n{dict(Counter(_kind(results.get(fault.name)) for fault in faults))}")


def _cell(result: dict[str, Any] | None) -> str:
    if result is None or result["outcome"] != "caught":
        return f"**{_kind(result)}**"
    file, _, name = result["by"].partition("::")
    test = "::".join(filter(None, (Path(file).name, name))).replace("|", "\\|")
    how = "" if result["how"] == "failure" else f" ({result['how']})"
    return f"{'wide: ' if result['wide'] else ''}`{test}`{how}"


def keep(options: argparse.Namespace) -> None:
    """Write the tests that catch faults to `catchers.jsonl`, before those that it has for the same fault."""
    kept = {entry["fault"]: entry["tests"] for entry in read_results(CATCHERS)}
    for path in options.results:
        for result in read_results(path):
            if result["outcome"] == "caught" and result["by"] != SESSION:
                known = [test for test in kept.get(result["fault"], []) if test != result["by"]]
                kept[result["fault"]] = [result["by"], *known][:2]
    names = [fault.name for fault in read_faults(FAULTS, [])]
    CATCHERS.write_text(
        "".join(json.dumps({"fault": name, "tests": kept[name]}) + "\n" for name in names if kept.get(name))
    )


def _existing(word: str) -> Path:
    if not Path(word).is_file():
        raise argparse.ArgumentTypeError(f"there is no file '{word}'")
    return Path(word)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for function in (run, table, keep):
        added = commands.add_parser(function.__name__, help=function.__doc__, description=function.__doc__)
        added.set_defaults(function=function)
        if function is not run:
            added.add_argument("results", type=_existing, nargs="+", help="files that `run` has written with --out")
            continue
        added.add_argument("--out", type=Path, required=True, metavar="RESULTS", help="results, a line of JSON a fault")
        added.add_argument("--only", action="append", default=[], metavar="WORDS", help="faults whose names hold them")
        added.add_argument("--jobs", type=int, default=2, help="faults at a time (default: 2)")
        added.add_argument("--budget", type=float, default=86400.0, metavar="SECONDS", help="when to stop")
    options = parser.parse_args()
    options.function(options)


if __name__ == "__main__":
    main()
