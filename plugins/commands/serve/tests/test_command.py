"""mplug serve keeps the contract of commands. The other file tests what it answers."""

import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from mplug_serve.command import command
from mplug_serve.work import listen

from mplug import UsageError
from mplug_sampling.saved_model import Chosen, ModelOptions
from mplug_testing import CommandSuite
from mplug_testing.harness import tiny_run


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


def test_a_run_that_computes_scores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run({"data.name": "mock", "data.pairs": True, "data.documents": 4, "objectives.reward": {}})
    weights: Any = None  # the refusal comes before anything reads them
    monkeypatch.setattr(ModelOptions, "chosen", lambda *_: Chosen({}, {}, run, weights, Path("runs/mine")))
    with pytest.raises(UsageError, match=r"computes a score of an answer .*, and continues no text"):
        CliRunner().invoke(command, ["--name", "mine"], catch_exceptions=False)


def test_a_missing_folder_of_new_weights_is_refused_before_the_run_is_read() -> None:
    with pytest.raises(UsageError, match="--load-from: directory 'nowhere' does not exist"):
        CliRunner().invoke(command, ["--load-from", "nowhere"], catch_exceptions=False)
