"""The machines of the tests: they reach each other until a link is cut, and again when it is mended."""

import socket
import sys
import time
from pathlib import Path

import pytest
from machines import Machines
from warm import Forked

CONNECTS = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), 1)
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.wide("machines")
def test_machines_have_names_and_reach_each_other_until_a_link_is_cut_and_again_when_it_is_mended(
    two_machines: Machines, tmp_path: Path
) -> None:
    first, second = two_machines

    def reaches(address: str) -> str:
        return first.run(sys.executable, "-S", "-c", CONNECTS, address).stdout.strip()

    assert {reaches(second.address), reaches(second.address6), reaches(second.name)} == {"ConnectionRefusedError"}
    assert {"switch", "port0"}.isdisjoint(name for _, name in socket.if_nameindex())
    two_machines.cut(1)
    assert reaches(second.address) == "TimeoutError"
    two_machines.mend(1)
    assert reaches(second.address) == "ConnectionRefusedError"
    (tmp_path / "names.py").write_text("import socket; print(socket.gethostname(), socket.gethostbyname('node02'))")
    fork = Forked("names", cwd=tmp_path, environment={}, machine=second.pid)
    assert fork.communicate(60) == ("node02 127.0.1.1\n", "")
    process = second.popen("sleep", "1000")
    while second.pids() != [process.pid]:  # `nsenter` joins the namespaces after it has begun
        time.sleep(0.01)
    two_machines.__exit__()
    assert process.wait(60) == -9, "processes end with their machine"
    two_machines.__enter__()  # the fixture closes it
