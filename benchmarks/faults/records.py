"""The records of mutants: results of campaigns, the tests that kill, and the mutants that change no result."""

import queue
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from mutants import Mutant, mutants_of
from sessions import NOT_FOUND, PASSED, run_recorded
from slots import Slot
from workspace import HERE, Outcome, whole_lines

TREE = HERE.parent.parent
KILLERS, EQUIVALENT = HERE / "killers.jsonl", HERE / "equivalent.yaml"
SEED = 38
SESSION = "the session"
"""What kills a mutant with which pytest ends before any test does."""


def caught(outcome: Outcome) -> tuple[str, str | None]:
    """(how, the test) of a session that kills a mutant; the test is None where it does not."""
    if outcome.failed:
        return "failure", outcome.failed[0]
    if outcome.status is None:
        return "time-out", next(iter(outcome.unfinished), SESSION)
    if outcome.status in PASSED:
        return "", None
    return ("exit", outcome.unfinished[0]) if outcome.unfinished else ("error", SESSION)


def read_results(path: Path) -> list[dict[str, Any]]:
    """The lines that a file holds so far."""
    return list(whole_lines(path)) if path.exists() else []


def equivalents() -> set[str]:
    """The names of the mutants that change no result."""
    listed = yaml.safe_load(EQUIVALENT.read_text()) if EQUIVALENT.exists() else []
    return {name for entry in listed or [] for name in entry["mutants"]}


Entry = tuple[Mutant, dict[str, Any]]


def recorded() -> tuple[list[Entry], list[str]]:
    """(mutants of this tree with their records, the names of recorded mutants that the code no longer has)."""
    mutants = {mutant.name: mutant for mutant in mutants_of(TREE)}
    current, stale = list[Entry](), list[str]()
    for entry in read_results(KILLERS):
        if entry["how"] == "survives":
            continue
        mutant = mutants.get(entry["mutant"])
        if mutant is not None and mutant.change == entry["change"]:
            current.append((mutant, entry))
        else:
            stale.append(entry["mutant"])
    return current, stale


def alive() -> set[str]:
    """The names of the mutants of this tree that survive and are not known to change no result."""
    changes = {mutant.name: mutant.change for mutant in mutants_of(TREE)}
    entries = (entry for entry in read_results(KILLERS) if entry["how"] == "survives")
    return {entry["mutant"] for entry in entries if changes.get(entry["mutant"]) == entry["change"]} - equivalents()


def sample(entries: list[Entry], number: int) -> list[Entry]:
    """The same mutants in every run, of different operators and files as far as possible."""
    shuffled = random.Random(SEED).sample(entries, len(entries))
    seen = Counter[str]()
    ranked = []
    for mutant, entry in shuffled:
        seen.update((mutant.operator, mutant.file, entry["by"]))
        ranked.append((seen[mutant.operator] + seen[mutant.file] + seen[entry["by"]], mutant, entry))
    ranked.sort(key=lambda one: one[0])
    return [(mutant, entry) for _, mutant, entry in ranked[:number]]


KILLED, BY_WIDE, SURVIVES, MISSING = "killed", "killed by a wide test", "survives", "its recorded test is missing"
"""What the recorded test of a mutant says of it today."""


def verdict(slot: Slot, entry: Entry, arguments: Sequence[str] = (), patience: float = 30.0) -> str:
    """Plant a mutant in a slot, and run its recorded test."""
    mutant, record = entry
    source = (TREE / mutant.file).read_bytes()
    slot.put(mutant.file, mutant.applied(source))
    try:
        outcome, is_wide = run_recorded(slot, [record["by"]], arguments, patience)
    finally:
        slot.put(mutant.file, source)
    if outcome.status == NOT_FOUND:
        return MISSING
    if caught(outcome)[1] is None:
        return SURVIVES
    return BY_WIDE if is_wide else KILLED


def verdicts(entries: Sequence[Entry], python: str, jobs: int, arguments: Sequence[str] = ()) -> dict[str, str]:
    """The verdict on each mutant, by its name, with so many slots at a time."""
    waiting: queue.SimpleQueue[Entry] = queue.SimpleQueue()
    for chosen in sorted(entries, key=lambda one: one[1]["how"] == "time-out"):
        waiting.put(chosen)
    found = dict[str, str]()

    def drive(folder: Path) -> None:
        slot = Slot(TREE, folder, python)
        try:
            while True:
                entry = waiting.get_nowait()
                found[entry[0].name] = verdict(slot, entry, arguments)
                print(f"{found[entry[0].name]:28} {entry[0].name}", flush=True)
        except queue.Empty:
            return
        finally:
            slot.close()

    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        names = [Path(folder).resolve() / f"slot{number}" for number in range(min(jobs, len(entries)))]
        threads = [threading.Thread(target=drive, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if not waiting.empty():
        raise RuntimeError("a slot ended before its mutants did")
    return found
