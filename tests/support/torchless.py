"""The script of the suites about start-up, in forks of one interpreter that has imported the host and no torch.

Every suite runs `python -c` to see that importing and configuring its plugin imports no torch. A new interpreter spends
most of that time on importing pydantic and the host, which are the same for all plugins.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mplug_testing.suite import _WITHOUT_TORCH

BEGINNING = _WITHOUT_TORCH.partition("{path")[0]
SERVER = """
import json, os, sys, tempfile, traceback
import mplug.run.prepare, mplug_testing.harness

mplug_testing.harness.installed_plugins()
mplug_testing.harness.tiny_settings()
assert "torch" not in sys.modules
for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            status = 1
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            try:
                exec(json.loads(line), {"__name__": "__main__"})
                status = 0
            except SystemExit as end:
                status = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        print(json.dumps([ended, output.read()]), flush=True)
"""
"""Reads a script a line as JSON, runs it in a fork, and prints its exit status and what it printed."""


@contextmanager
def forking_scripts(run: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """`subprocess.run` that runs the script of the suites in a fork of the server, which starts with the first one."""
    servers: list[subprocess.Popen[str]] = []

    def fork(command: list[str], **options: Any) -> Any:
        if command[:2] != [sys.executable, "-c"] or not command[2].startswith(BEGINNING):
            return run(command, **options)
        assert options == {"capture_output": True, "text": True}
        if not servers:
            starting = [sys.executable, "-c", SERVER]
            servers.append(subprocess.Popen(starting, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        (server,) = servers
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(command[2]) + "\n")
        server.stdin.flush()
        status, output = json.loads(server.stdout.readline())
        return subprocess.CompletedProcess(command, status, "", output)

    yield fork
    for server in servers:
        server.communicate()
