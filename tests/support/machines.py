"""Several machines on one: network namespaces that a virtual switch joins, each with its own host name.

    with Machines(2) as machines:  # tests use the fixture `two_machines`
        first = machines[0].popen("python", "-m", "mplug", "train", ..., cwd=folder, stdout=subprocess.PIPE)
        machines.cut(1)   # as if somebody pulled the cable of the second machine
        machines.mend(1)

A machine has an interface `eth0` with an IPv4 and an IPv6 address, its own loopback, its own host name, and its own
`/etc/hosts`, in which its own name stands for 127.0.1.1, as Debian installs it. Files and process ids are common to all
machines, so `os.kill` reaches every process. `warm.Forked(..., machine=machines[0].pid)` starts a module on a machine
in a process that has imported torch already. The namespaces need no root: they are made in a user namespace, where the
kernel permits that. `unavailable()` gives the reason where it does not.

When `Machines` closes, it kills every process that still runs in a namespace. When the test process dies, the
namespaces go with their last process.
"""

import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

TOOLS = ("nsenter", "unshare")
LINKS = (sys.executable, "-S", os.fspath(Path(__file__).with_name("links.py")))
"""The command that makes network links."""
READY = "echo ready && exec cat"
"""What holds a namespace: it ends with its standard input, thus at the latest with the test process."""


class Refused(Exception):
    """The kernel permits no namespaces here, or a tool is missing."""


@dataclass(frozen=True)
class Machine:
    """One machine: where it is reached, and how to run commands on it."""

    number: int
    name: str
    address: str
    address6: str
    pid: int
    """The process that holds its namespaces."""

    def words(self, *words: str, cwd: str | os.PathLike[str] | None = None) -> list[str]:
        """The words of a command that runs `words` on this machine. Its process id is that of the command itself."""
        enter = _enter(self.pid, "--net", "--uts", "--mount")  # the last also changes the working directory to /
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', os.fspath(cwd or Path.cwd()), *words]

    def popen(self, *words: str, cwd: str | os.PathLike[str] | None = None, **options: Any) -> subprocess.Popen[Any]:
        """Start a command on this machine; the options are those of `subprocess.Popen`."""
        return subprocess.Popen(self.words(*words, cwd=cwd), **options)

    def run(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.words(*words), check=True, capture_output=True, text=True, **options)

    def pids(self) -> list[int]:
        """The processes that run on this machine, except the one that holds its namespaces."""
        mine = os.readlink(f"/proc/{self.pid}/ns/net")
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != self.pid:
                with suppress(OSError):  # it has ended, or belongs to another user
                    if os.readlink(folder / "ns" / "net") == mine:
                        found.append(int(folder.name))
        return found


class Machines:
    """A number of machines on a common network, for a block. Raises Refused where the kernel permits none."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._machines: list[Machine]

    def __getitem__(self, number: int) -> Machine:
        return self._machines[number]

    def __iter__(self) -> Iterator[Machine]:
        return iter(self._machines)

    def __len__(self) -> int:
        return self._number

    def __enter__(self) -> Self:
        self._machines = []
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mplug-machines-")))
            self._switch = _hold(stack, ["unshare", "--user", "--map-root-user", "--net"])
            self._in_switch("bridge", "switch")
            self._in_switch("up", "switch")
            for number in range(self._number):
                self._machines.append(self._machine(stack, number))
            stack.callback(self._kill_all)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def cut(self, number: int) -> None:
        """Pull a machine's cable: packets are lost in both directions, and no connection is told."""
        self._in_switch("down", f"port{number}")

    def mend(self, number: int) -> None:
        self._in_switch("up", f"port{number}")

    def _in_switch(self, *words: str) -> None:
        """Run `links.py` in the namespace of the switch."""
        _run([*_enter(self._switch, "--net"), *LINKS, *words])

    def _machine(self, stack: ExitStack, number: int) -> Machine:
        name, address, address6 = f"node{number + 1:02d}", f"10.77.0.{number + 1}", f"fd77::{number + 1}"
        pid = _hold(stack, [*_enter(self._switch, "--net"), "unshare", "--net", "--uts", "--mount"])
        machine = Machine(number, name, address, address6, pid)
        hosts, resolver = self._folder / f"hosts-{name}", self._folder / "resolv.conf"
        resolver.write_text("nameserver 127.0.0.1\n")  # nobody listens there: names unknown to `hosts` fail at once
        others = "".join(
            f"10.77.0.{other + 1} node{other + 1:02d}{'-eth0' * (other == number)}\n"
            f"fd77::{other + 1} node{other + 1:02d}-6\n"
            for other in range(self._number)
        )
        hosts.write_text(f"127.0.0.1 localhost\n::1 localhost ip6-localhost\n127.0.1.1 {name}\n{others}")
        self._in_switch("cable", f"port{number}", "switch", "eth0", str(pid))
        self._in_switch("up", f"port{number}")
        _run(machine.words(*LINKS, "up", "lo", "eth0"))
        _run(machine.words(*LINKS, "address", "eth0", f"{address}/24", f"{address6}/64"))
        script = f"mount --bind '{hosts}' /etc/hosts && mount --bind '{resolver}' /etc/resolv.conf"
        _run(machine.words("sh", "-c", script))
        _run(machine.words(sys.executable, "-S", "-c", f"import socket; socket.sethostname('{name}')"))
        return machine

    def _kill_all(self) -> None:
        deadline = time.monotonic() + 60
        while left := [pid for machine in self._machines for pid in machine.pids()]:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < deadline, f"processes {left} do not end"
            time.sleep(0.01)


def _enter(pid: int, *namespaces: str) -> list[str]:
    return ["nsenter", f"--target={pid}", "--user", *namespaces, "--preserve-credentials", "--"]


def _hold(stack: ExitStack, words: list[str]) -> int:
    """The process id of a process that holds the namespaces which a command makes, until the stack closes."""
    process = subprocess.Popen(
        [*words, "sh", "-c", READY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    stack.callback(process.communicate)  # closes its standard input, with which it ends
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        assert process.stderr is not None
        raise Refused(f"'{' '.join(words[:4])}' fails: {process.stderr.read().strip()}")
    return process.pid


def _run(words: list[str]) -> None:
    finished = subprocess.run(words, capture_output=True, text=True)
    if finished.returncode != 0:
        raise Refused(f"'{' '.join(words)}' fails: {finished.stderr.strip()}")


@functools.cache
def unavailable() -> str | None:
    """Why there can be no machines here; None where there can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"there is no '{missing[0]}' here"
    try:
        with Machines(1):
            return None
    except Refused as refused:
        return f"network namespaces are not permitted here: {refused}"


def enter(pid: int) -> None:
    """Move this process to a machine, given the machine's `pid`. The process must have a single thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    files = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in ("user", "net", "uts", "mnt")]
    for file in files:
        if libc.setns(file, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.close(file)
