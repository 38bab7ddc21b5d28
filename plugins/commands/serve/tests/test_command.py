"""mplug serve keeps the contract of commands. The other file tests what it answers."""

import socket

import pytest
from click.testing import CliRunner
from mplug_serve import command
from mplug_serve.work import listen

from mplug import UsageError
from mplug_testing import CommandSuite


class TestServe(CommandSuite):
    plugin = "serve"
    refused = (
        ("--name", "nowhere"),
        ("--pretrained", "nowhere"),
        ("--pretrained", ".", "--name", "both"),
        ("--host", "0.0.0.0"),  # no key
        ("--key", ""),
        ("--port", "70000"),
        ("--lanes", "0"),
        ("--timeout", "0"),
        ("--set", "steps=3"),
    )


def test_a_port_in_use_is_refused_before_the_weights_are_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"--port {port}: .*; choose another --port \(0: a free one\)"):
            listen(("127.0.0.1", port))


def test_a_missing_folder_of_new_weights_is_refused_before_the_run_is_read() -> None:
    with pytest.raises(UsageError, match="--load-from: directory 'nowhere' does not exist"):
        CliRunner().invoke(command, ["--load-from", "nowhere"], catch_exceptions=False)
