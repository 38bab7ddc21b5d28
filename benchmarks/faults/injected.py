"""Faults in runs of 4 to 8 processes: whether one sentence names each within 30 s, and whether anything is lost.

    python benchmarks/faults/injected.py --runs 8 [--first 0] [--seconds 400] [--jobs 4] [--machines]
                                         [--kinds kill stop] [--out results.jsonl]
    python benchmarks/faults/injected.py --table results.jsonl ...

A run receives about twenty faults one after another; kinds, steps, ranks and seeds follow from the number of the run.
It goes on with spare processes, or restarts, or ends and resumes, and all its steps must have exactly the losses of an
undisturbed run. `--jobs` runs are under way at a time, and all end after `--seconds`. With `--machines`, the processes
of a run are on two network namespaces, whose link is cut too. A fault that is missed is printed at once, and a table by
kind at the end. With `--out`, each run appends a line of JSON to a file, of which `--table` makes the table.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from fault_plans import KINDS, LAYOUTS, Fault, Plan, plan
from fault_runs import Result, Shown, compare, disk_refusal, run_plan
from machines import unavailable


def shown_by(drawn: Plan, deadline: float, has_disk: bool) -> Shown:
    """What the run of a plan shows, in a temporary folder."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        return run_plan(drawn, Path(name), deadline, has_disk)


def table(results: Sequence[Result], false: int) -> str:
    """A row for each kind."""
    head = "| fault | injected | named right in 30 s | with another rank | median s | longest s | nothing lost |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for kind in [kind for kind in KINDS if any(one.fault.kind == kind for one in results)]:
        own = [one for one in results if one.fault.kind == kind]
        times = sorted(one.seconds for one in own if one.is_named and one.seconds is not None)
        middle = f"{times[len(times) // 2]:.1f} | {times[-1]:.1f}" if times else "- | -"
        pairs = sum(one.is_named and not one.names_one for one in own)
        lines.append(
            f"| {kind} | {len(own)} | {len(times)} | {pairs} | {middle} | {sum(not one.lost for one in own)} |"
        )
    named, kept = sum(one.is_named for one in results), sum(not one.lost for one in results)
    lines.append(f"| all | {len(results)} | {named} | | | | {kept} |")
    return "\n".join([*lines, "", f"sentences that name nothing that was injected: {false}"])


def row_of(one: Result) -> str:
    """The row of a fault."""
    verdict = "named" if one.is_named else "NOT NAMED"
    when = "-" if one.seconds is None else f"{one.seconds:.1f} s"
    fault = one.fault
    place = f"run {one.plan} {one.layout} {one.recovery}, {fault.number} {fault.kind} rank {fault.rank} step {fault.at}"
    return f"{place}: {verdict}, {when}, {f'LOST: {one.lost}' if one.lost else 'nothing lost'}: {one.sentence[:600]}"


def read_results(paths: Sequence[Path]) -> tuple[list[Result], int]:
    """The results in files of `--out`, of a run that was repeated the last ones, and the number of false sentences."""
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    last = {(row["run"], row["is_on_machines"]): row for row in rows}
    results = [Result(**{**one, "fault": Fault(**one["fault"])}) for row in last.values() for one in row["results"]]
    return results, sum(len(set(row["false"])) for row in last.values())


def run_all(options: argparse.Namespace) -> Iterator[tuple[Plan, Shown]]:
    """Run plans until the time is over, each in a process of its own that starts the processes of the run."""
    end, kinds = time.monotonic() + options.seconds, set(options.kinds)
    with tempfile.TemporaryDirectory() as name:
        refusal = disk_refusal(Path(name)) if "disk" in kinds else "not asked for"
    if refusal is not None and "disk" in kinds:
        print(f"no full disks: no file system can be mounted here: {refusal}", flush=True)
        kinds.discard("disk")
    if (reason := unavailable()) is not None and options.machines:
        raise SystemExit(f"no network namespaces here: {reason}")
    plans = [plan(number, kinds, options.machines) for number in range(options.first, options.first + options.runs)]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        layouts, has_disk = dict.fromkeys(one.layout for one in plans), refusal is None
        undisturbed = {layout: pool.submit(shown_by, Plan(0, layout, "restarts", ()), end, False) for layout in layouts}
        left, under_way = iter(plans), dict[Future[Shown], Plan]()
        while True:
            while len(under_way) < options.jobs and time.monotonic() < end and (one := next(left, None)) is not None:
                under_way[pool.submit(shown_by, one, end, has_disk)] = one
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED)[0]:
                one = under_way.pop(future)
                if (error := future.exception()) is not None:  # one of this tool: the other runs go on
                    print(f"run {one.number} {one.layout} {one.recovery}: Error of the tool: {error!r}", flush=True)
                    continue
                found = future.result()
                whole = undisturbed[one.layout]
                if whole.exception() is not None or whole.result().end != "whole":
                    print(f"run {one.number}: Error of the tool: the undisturbed run of {one.layout} is not complete")
                    continue
                compare(found, one.steps, whole.result().losses)
                yield one, found


def report(drawn: Plan, found: Shown, seconds: float, is_verbose: bool) -> None:
    """Print what a run has shown: misses in full."""
    named, kept = sum(one.is_named for one in found.results), sum(not one.lost for one in found.results)
    print(
        f"run {drawn.number} {drawn.layout} {drawn.recovery}: {len(found.results)} faults, {named} named, "
        f"{kept} without loss, {len(found.false)} false sentences, {len(found.losses)} steps, "
        f"{found.attempts} starts; {seconds:.0f} s",
        flush=True,
    )
    for one in found.results:
        if is_verbose or not one.is_named or one.lost:
            print(f"  {row_of(one)}", flush=True)
    for text in found.false:
        print(f"  FALSE: {text[:600]}", flush=True)


def main() -> None:
    """Run the plans until the time is over, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--runs", type=int, default=len(LAYOUTS))
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--machines", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--verbose", action="store_true", help="print every fault")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, nargs="+")
    options = parser.parse_args()
    results, false, began = list[Result](), 0, time.monotonic()
    if options.table:
        results, false = read_results(options.table)
    else:
        for drawn, found in run_all(options):
            report(drawn, found, time.monotonic() - began, options.verbose)
            results, false = [*results, *found.results], false + len(found.false)
            if options.out:
                row = {"run": drawn.number, "is_on_machines": options.machines, **asdict(found)}
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(table(results, false))


if __name__ == "__main__":
    main()
