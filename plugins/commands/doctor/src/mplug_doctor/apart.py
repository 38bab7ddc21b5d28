"""Runs each probe apart, so that one that crashes or hangs is a line of the report."""

import json
import subprocess
import sys
from collections.abc import Callable

from mplug_doctor.findings import Findings

MARK = "mplug doctor: "
"""Prefix of the line with a probe's findings; libraries may print other lines."""
SECONDS = 90.0
"""Maximum time of a probe in a process of its own."""
SHOWN = 300
"""Characters of a crashed probe's last words that are shown."""


def in_process(name: str, probe: Callable[[], Findings]) -> Findings:
    """The findings of a probe that imports nothing heavy; an exception of it is a problem."""
    try:
        return probe()
    except Exception as error:  # a report that ends at its first surprise is of no use
        return _failed(name, f"{type(error).__name__}: {error}")


def in_subprocess(name: str, module: str, given: str = "", seconds: float = SECONDS) -> Findings:
    """The findings that `python -m MODULE` prints about the text `given`; its crash or time-out is a problem."""
    command = [sys.executable, "-m", module]
    try:
        finished = subprocess.run(command, input=given, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return _failed(name, f"it gave no answer within {seconds:g} s")
    except OSError as error:
        return _failed(name, str(error))
    lines = [line.removeprefix(MARK) for line in finished.stdout.splitlines() if line.startswith(MARK)]
    if finished.returncode != 0 or not lines:
        words = finished.stderr.strip().splitlines()
        return _failed(name, f"its process ended with status {finished.returncode}: {(words or [''])[-1][:SHOWN]}")
    return Findings.of_data(json.loads(lines[-1]))


def answer(findings: Findings) -> None:
    """Print the findings of a probe, in its process."""
    print(f"\n{MARK}{json.dumps(findings.as_data())}", flush=True)


def _failed(name: str, reason: str) -> Findings:
    findings = Findings()
    findings.problem(f"the probe of {name} failed: {reason}", "report it with this text")
    return findings
