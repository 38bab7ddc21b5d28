"""Answers of a server that completes prompts: what is wrong with one is said, and what passes is asked again."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mplug_rollouts import served as served_module
from mplug_rollouts import server
from mplug_rollouts.config import RolloutsConfig, ServerConfig
from mplug_rollouts.server import Client, Want
from pydantic import ValidationError

from mplug import RunError, UsageError

WANT = Want(num_tokens=3, temperature=0.7, vocab_size=10, ends={9})


def choice(tokens: Any, scores: Any) -> dict[str, Any]:
    return {"choices": [{"text": "", "token_ids": tokens, "logprobs": {"token_logprobs": scores}}]}


GOOD = (200, choice([1, 9], [-0.1, -0.2]))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[tuple[int, Any]], list[Any]]]:
    """(address, the answers that the server gives in turn, the requests that it has got)."""
    monkeypatch.setattr(server, "PAUSE", 0.001)
    answers: list[tuple[int, Any]] = []
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers.get("Authorization"), body))
            status, answer = answers.pop(0)
            text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}", answers, asked
    found.shutdown()
    found.server_close()


def test_a_request_that_fails_is_sent_again_with_the_key(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    address, answers, asked = served
    monkeypatch.setenv("A_KEY", "secret")
    answers += [(503, {"error": "busy"}), (429, b""), GOOD]
    client = Client(ServerConfig(addresses=[address], retries=2, key_variable="A_KEY", model="m"))
    (found,) = client.complete([[4, 5]], [2**40 + 7], WANT)
    assert (found.tokens, found.log_probabilities, found.truncated) == ([1, 9], [-0.1, -0.2], False)
    path, key, body = asked[2]
    assert (path, key) == ("/v1/completions", "Bearer secret")
    sampling = {"max_tokens": 3, "temperature": 0.7, "seed": 7, "logprobs": 0, "return_token_ids": True}
    sampling |= {"top_p": 1.0, "top_k": 0}
    assert body == {"prompt": [4, 5], "model": "m", **sampling}


def test_tokens_behind_the_end_are_dropped_and_all_tokens_make_a_truncated_text(served: Any) -> None:
    address, answers, _ = served
    answers += [(200, choice([9, 3], [-0.5, -9.0])), (200, choice([1, 2, 3], [-1, -2, -3]))]
    client = Client(ServerConfig(addresses=[address], connections=1))
    first, second = client.complete([[1], [2]], [0, 0], WANT)
    assert (first.tokens, first.truncated, second.tokens, second.truncated) == ([9], False, [1, 2, 3], True)


BAD = [
    ((200, b"<html>"), "answers with what is no JSON: <html>"),
    ((200, {"choices": []}), "has no 'token_ids' with 'logprobs'"),
    ((200, {"choices": [{"text": "a", "logprobs": None}]}), "has no 'token_ids' with 'logprobs'"),
    ((200, choice([], [])), "has not between 1 and 3 tokens"),
    ((200, choice([1, 2, 3, 9], [-1.0] * 4)), "has not between 1 and 3 tokens"),
    ((200, choice([1, 9], [-1.0])), "2 tokens and 1 log-probabilities"),
    ((200, choice([10, 9], [-1.0, -1.0])), "has the token 10, and the tokenizer of the run has 10 tokens"),
    ((200, choice([True, 9], [-1.0, -1.0])), "has the token True"),
    ((200, choice([1, 9], [-1.0, 0.5])), "has the log-probability 0.5"),
    ((200, choice([1, 9], [None, -0.5])), "has the log-probability None"),
    ((200, choice([1, 2], [-1.0, -1.0])), "ends after 2 of 3 tokens without an end token of the run"),
    ((404, {"error": {"message": "no model"}}), "refuses /v1/completions with status 404: .*no model"),
    ((500, b"broken"), "gave no answer in 1 attempts: status 500: broken"),
]


@pytest.mark.parametrize(("answer", "sentence"), BAD)
def test_a_bad_answer_is_one_sentence(answer: Any, sentence: str, served: Any) -> None:
    address, answers, _ = served
    answers.append(answer)
    with pytest.raises(RunError, match=sentence):
        Client(ServerConfig(addresses=[address], retries=0)).complete([[1]], [0], WANT)


def test_a_server_that_is_not_there_and_a_key_that_is_not_set_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    with pytest.raises(RunError, match=r"http://127\.0\.0\.1:1 of data\.server.* gave no answer in 1 attempts"):
        Client(ServerConfig(addresses=["http://127.0.0.1:1"], retries=0)).complete([[1]], [0], WANT)
    with pytest.raises(UsageError, match="the variable 'A_KEY', which is not set"):
        Client(ServerConfig(addresses=["http://127.0.0.1:1"], key_variable="A_KEY"))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"server": {"addresses": ["127.0.0.1:8000"]}}, "is no address of a server"),
        ({"server": {"addresses": ["http://me:secret@a"]}}, "has no user and password"),
        ({"completions": "served"}, "belong together"),
        ({"server": {"addresses": ["http://a"]}}, "belong together"),
        ({"completions": "served", "server": {"addresses": ["http://a"]}, "graphs": True}, "graphs is of the sampler"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        RolloutsConfig(path="a.jsonl", rewards=["m:f"], **fields)


def program(path: Path, lines: str) -> str:
    """A program in the place of Python, which gets: -m mplug_rollouts.exporting PARENT checkpoint export FOLDER ..."""
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return str(path)


def test_an_export_that_writes_many_warnings_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", program(tmp_path / "python", 'head -c 200000 /dev/zero >&2; mkdir "$6"'))
    exports = served_module.Exports(tmp_path, "huggingface")
    exports.add(4)
    deadline = time.monotonic() + 20
    while (found := exports.finished()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert found == (4, tmp_path / "served" / "step_00000004")


def test_an_export_that_does_not_end_is_killed_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = 'trap "" TERM; mkdir "${6%/*}/.export-1"; touch begun; while :; do sleep 0.1; done'
    monkeypatch.setattr(sys, "executable", program(tmp_path / "python", lines))
    monkeypatch.setattr(served_module, "PATIENCE", 0.1)
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    exports = served_module.Exports(run, "huggingface")
    exports.add(4)
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    process = exports._process
    exports.close()
    assert process is not None
    assert process.poll() is not None
    assert [*(run / "served").iterdir()] == []


class Loads:
    """A server that records the folders of its requests to load weights."""

    def __init__(self, fails: bool = False) -> None:
        self.folders, self.fails = list[str](), fails

    def load(self, folder: Path) -> None:
        if self.fails:
            raise RunError("no answer")
        self.folders.append(folder.name)


ENDINGS = {
    "done": "",
    "the server is gone": "the server has the weights of step 0, and not those of step 6: no answer",
    "Ctrl-C": "the server has the weights of step 0, and not those of step 6, because the run was asked to stop",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_weights_of_the_last_checkpoint_reach_the_server(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last checkpoint is complete while the export of the one before is under way."""
    monkeypatch.setattr(sys, "executable", program(tmp_path / "python", 'sleep 0.2; mkdir "$6"'))
    run: Any = SimpleNamespace(rank=0, directory=tmp_path, stop_requested=ending == "Ctrl-C")
    sampler = served_module.ServedSampler(run, ServerConfig(addresses=["http://a"], weights="checkpoints"))
    sampler.client = loads = Loads(fails=ending == "the server is gone")  # type: ignore[assignment]
    for step in (4, 6):
        sampler.saved(tmp_path / f"step_{step:08d}")
    sampler.finish()
    sampler.close()
    said = capsys.readouterr().err
    assert "waiting for the export of step 6, whose weights the server loads" in said
    assert ENDINGS[ending] in said
    assert ("and not those" in said) is (ending != "done")
    assert loads.folders == (["step_00000004", "step_00000006"] if ending == "done" else [])


WATCHED = """
import os, subprocess, sys, time
code = "import sys, time; from mplug_rollouts.parent import end_with_parent; end_with_parent(int(sys.argv[1]))"
code += "; print(flush=True); time.sleep(99)"
child = subprocess.Popen([sys.executable, "-c", code, str(os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(99)
"""


def test_an_export_ends_when_its_run_is_killed() -> None:
    run = subprocess.Popen([sys.executable, "-c", WATCHED], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    with run.stdout:
        child = Path("/proc") / run.stdout.readline().strip() / "stat"
    assert child.exists()
    run.kill()
    run.wait()
    deadline = time.monotonic() + 20
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)
