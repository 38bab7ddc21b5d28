"""The connections of this process to the store at which the processes of a run meet."""

import os
import socket
import stat
import sys
from contextlib import suppress

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def end_waits(port: int) -> None:
    """End the connections of this process to the store at a port of this machine: what waits there raises an error.

    A process that meets the others waits there for each of them, for minutes, also for one that has died. Not in a
    process that uses a GPU: threads of NCCL use the store too.
    """
    torch = sys.modules.get("torch")
    if torch is None or torch.cuda.is_initialized():
        return
    for number in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # closed in the meantime, or not connected
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                other = socket.socket(fileno=number)
                try:
                    if other.family in (socket.AF_INET, socket.AF_INET6) and _is_store(other.getpeername(), port):
                        other.shutdown(socket.SHUT_RDWR)
                finally:
                    other.detach()  # it is not this object's, which would close it


def _is_store(address: tuple[str, int], port: int) -> bool:
    return address[0] in LOOPBACK and address[1] == port
