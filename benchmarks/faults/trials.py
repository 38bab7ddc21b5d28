"""Plants mutants in slots, and runs tests until one fails: the mutants that wait, and the trial of each."""

import argparse
import json
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mutants import Mutant
from records import KILLERS, SESSION, TREE, caught, read_results
from selection import Coverage, Kills
from slots import Slot, Stopped
from workspace import Outcome

SETTLED = ("killed", "survived", "not executed")


class Campaign:
    """The mutants still to try, shared by the threads that drive the slots."""

    def __init__(self, options: argparse.Namespace, mutants: Sequence[Mutant], coverage: Coverage) -> None:
        self.options, self.coverage = options, coverage
        results = read_results(options.out)
        self.last = {result["mutant"]: result for result in results if "mutant" in result}
        self.kills = Kills([*read_results(KILLERS), *self.last.values()])
        self.sound = {result["test"]: result["sound"] for result in results if "test" in result}
        self.lock = threading.Lock()
        self.waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
        self.number = 0
        left = [mutant for mutant in mutants if self.last.get(mutant.name, {}).get("outcome") not in SETTLED]
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


def drive(campaign: Campaign, folder: Path, stop_at: float) -> None:
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
