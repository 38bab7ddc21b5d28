"""A pytest plugin: reports outcomes and durations to a file, and tells the recorder which test runs.

`run.py` installs it into the copy of an environment as `mplug_faults_plugin`.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

REPORT = "MPLUG_FAULTS_REPORT"
"""The environment variable with the file to which outcomes are appended."""
WORKER = os.environ.get("PYTEST_XDIST_WORKER")

if "MPLUG_RECORD" in os.environ:
    import mplug_faults_recorder as recorder

    os.environ[recorder.NOW] = os.path.join(os.environ[recorder.FOLDER], f"now-{WORKER or 'main'}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
        """Record a test under its name."""
        with open(os.environ[recorder.NOW], "w") as file:
            file.write(item.nodeid)
        recorder.write(item.nodeid)
        try:
            return (yield)
        finally:
            recorder.write(recorder.BETWEEN)


if WORKER is None and REPORT in os.environ:

    def _report(**facts: Any) -> None:
        with open(os.environ[REPORT], "a") as file:
            file.write(json.dumps(facts) + "\n")

    def pytest_runtest_logstart(nodeid: str) -> None:
        """A test begins."""
        _report(test=nodeid, outcome="started", seconds=0.0)

    def pytest_runtest_logreport(report: pytest.TestReport) -> None:
        """A phase of a test has ended."""
        _report(test=report.nodeid, outcome=report.outcome, seconds=report.duration)

    def pytest_runtest_logfinish(nodeid: str) -> None:
        """All phases of a test have ended."""
        _report(test=nodeid, outcome="finished", seconds=0.0)

    def pytest_collectreport(report: pytest.CollectReport) -> None:
        """A file that cannot be collected is reported like a test that fails."""
        if report.outcome == "failed":
            _report(test=report.nodeid, outcome="failed", seconds=0.0)
