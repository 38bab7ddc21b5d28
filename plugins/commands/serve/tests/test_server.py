"""The server: its answers are those of sampling, and everything else that a client may send has a clear status."""

import html
import http.client
import json
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mplug_bytes import ByteTokenizer

from mplug_sampling import Sampling

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
from mplug_serve.engine import Engine
from served import LIMITS, PROMPT, Client, sampled, serving

KEY = "a key"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Chatting(ByteTokenizer):
    """Bytes with a chat template."""

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        if messages[0]["role"] not in ("user", "system"):
            raise ValueError("a conversation begins with 'user'")
        return self.encode("".join(f"{one['role'][0]}:{one['content']}\n" for one in messages) + "a:")


def idle(engine: Engine) -> None:
    """Wait until all lanes are free."""
    deadline = time.monotonic() + 20
    while engine.load["running"] or engine.load["waiting"]:
        assert time.monotonic() < deadline, engine.load
        time.sleep(0.01)


def test_answers_are_those_of_sampling_for_many_clients_at_once() -> None:
    prompts = ["def f(", "x", "class A:\n    pass\n" * 2, "é and ü"] * 4
    with serving() as (client, engine), ThreadPoolExecutor(16) as clients:
        found = list(clients.map(client.completion, prompts))
        assert found == [sampled(prompt) for prompt in prompts[:4]] * 4
        hot = {"temperature": 1.5, "top_p": 0.9, "top_k": 50, "seed": 5}
        assert client.completion("x", **hot) == sampled("x", 12, Sampling(1.5, 50, 0.9, seed=5))
        assert (
            client.completion("x", **hot)
            == client.completion("x", **hot)
            != client.completion("x", **hot | {"seed": 6})
        )
        idle(engine)


def test_a_streamed_answer_is_the_whole_one_in_parts() -> None:
    body = {"prompt": "ab", "temperature": 0, "max_tokens": 9, "n": 2, "stream": True}
    with serving(tokenizer=Chatting()) as (client, _):
        _, lines = client.ask("/v1/completions", {**body, "stream_options": {"include_usage": True}})
        *parts, last = [line.removeprefix("data: ") for line in lines.split("\n\n") if line]
        assert last == "[DONE]"
        *chunks, usage = map(json.loads, parts)
        assert usage["usage"] == {"prompt_tokens": 2, "completion_tokens": 18, "total_tokens": 20}
        for index in range(2):
            own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
            assert "".join(choice["text"] for choice in own) == sampled("ab", 9)
            assert [choice["finish_reason"] for choice in own][-1] == "length"
        chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "temperature": 0}
        status, whole = client.ask("/v1/chat/completions", {**chat, "max_completion_tokens": 7})
        assert (status, whole["choices"][0]["message"]["content"]) == (200, sampled("u:hi\na:", 7))
        _, lines = client.ask("/v1/chat/completions", {**chat, "max_tokens": 7, "stream": True})
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines.split("\n\n")[:-2]]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0]["role"] == "assistant"
        assert "".join(delta.get("content", "") for delta in deltas) == sampled("u:hi\na:", 7)


def test_a_stop_word_ends_an_answer_before_it() -> None:
    whole = sampled("ab", 30)
    word = whole[7:9]
    with serving() as (client, _):
        assert client.completion("ab", max_tokens=30, stop=word) == whole[: whole.index(word)]


MALFORMED: dict[str, tuple[str, Any, int, str]] = {
    "no JSON": ("/v1/completions", b"{", 400, "no JSON"),
    "bytes": ("/v1/completions", b"\xff\xfe", 400, "no JSON"),
    "deep": ("/v1/completions", b"[" * 3900, 400, "no JSON"),
    "surrogate": ("/v1/completions", b'{"prompt": "ab", "model": "\\ud800"}', 400, "half of a surrogate pair"),
    "list": ("/v1/completions", [1], 400, "must be a JSON object"),
    "no prompt": ("/v1/completions", {}, 400, "'prompt': field required"),
    "empty": ("/v1/completions", {"prompt": ""}, 400, "'prompt'"),
    "kind": ("/v1/completions", {"prompt": 5}, 400, "'prompt': input should be a text, or a list"),
    "field": (
        "/v1/completions",
        {**PROMPT, "max_tokns": 5},
        400,
        "'max_tokns' is no field of this request; leave it out (fields: logprobs, max_tokens, ",
    ),
    "unsupported": ("/v1/completions", {**PROMPT, "logprobs": 5}, 400, "'logprobs' above 0 is not supported"),
    "negative": ("/v1/completions", {**PROMPT, "max_tokens": -5}, 400, "greater than or equal to 1"),
    "text": ("/v1/completions", {**PROMPT, "max_tokens": "5"}, 400, "valid integer"),
    "nan": ("/v1/completions", b'{"prompt": "ab", "temperature": NaN}', 400, "'temperature'"),
    "hot": ("/v1/completions", {**PROMPT, "temperature": 1e9}, 400, "'temperature'"),
    "top_p": ("/v1/completions", {**PROMPT, "top_p": 0}, 400, "'top_p'"),
    "seed": ("/v1/completions", {**PROMPT, "seed": 2**70}, 400, "'seed'"),
    "stop": ("/v1/completions", {**PROMPT, "stop": [""]}, 400, "'stop"),
    "many": ("/v1/completions", {**PROMPT, "n": 9}, 400, "n=9 is more than the server computes together (3)"),
    "model": (
        "/v1/completions",
        {**PROMPT, "model": "gpt-4"},
        404,
        "there is no model 'gpt-4'; this server has 'tiny'",
    ),
    "long prompt": ("/v1/completions", {"prompt": "a" * 64}, 400, "64 tokens, and the model's context is 64"),
    "long answer": ("/v1/completions", {**PROMPT, "max_tokens": 41}, 400, "may have 40 tokens, not 41"),
    "context": ("/v1/completions", {"prompt": "a" * 40, "max_tokens": 30}, 400, "exceed the context of 64"),
    "body": ("/v1/completions", {"prompt": "a" * 5000}, 413, "more than 4000 bytes"),
    "no messages": ("/v1/chat/completions", {"messages": []}, 400, "'messages'"),
    "role": ("/v1/chat/completions", {"messages": [{"role": "tool", "content": ""}]}, 400, "begins with 'user'"),
    "image": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "type",
    ),
    "tools": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, 400, "'tools'"),
    "path": ("/v1/embeddings", {"input": "a"}, 404, "POST /v1/embeddings is no request of this server"),
    "method": ("/v1/completions", None, 405, "GET /v1/completions is no request of this server; use POST"),
}


def test_each_malformed_request_has_a_clear_status_and_the_server_goes_on() -> None:
    with serving(tokenizer=Chatting()) as (client, _):
        for name, (path, body, status, words) in MALFORMED.items():
            found, answer = client.ask(path, body)
            assert found == status, f"{name}: {answer}"
            assert words in answer["error"]["message"], f"{name}: {answer}"
        assert client.ask("/v1/models")[1]["data"][0]["id"] == "tiny"
        assert client.completion("ab") == sampled("ab")


def test_a_model_without_a_chat_template_says_so() -> None:
    with serving() as (client, _):
        status, answer = client.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
        assert (status, "/v1/completions" in answer["error"]["message"]) == (400, True)


def test_only_clients_with_the_key_use_the_model() -> None:
    with serving(key=KEY) as (client, _):
        assert client.completion("ab") == sampled("ab")
        assert client.ask("/")[0] == client.ask("/health")[0] == 200
        for key in (None, "another", "ä"):
            other = Client(client.port, None)
            other.headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}  # type: ignore[dict-item]
            assert other.ask("/v1/models")[0] == other.ask("/v1/completions", PROMPT)[0] == 401


def test_a_full_queue_refuses_a_request_and_time_ends_one_that_waits() -> None:
    """The engine has not started, so lanes stay empty: three requests wait for them, one in the queue."""
    limits = replace(LIMITS, queue=1, seconds=1)
    with serving(limits, started=False) as (client, engine), ThreadPoolExecutor(4) as clients:
        waiting = [clients.submit(client.ask, "/v1/completions", PROMPT) for _ in range(4)]
        while engine.load["waiting"] < 4:
            time.sleep(0.01)
        status, answer = client.ask("/v1/completions", PROMPT)
        assert (status, "busy" in answer["error"]["message"]) == (503, True)
        time.sleep(1)
        thread = threading.Thread(target=engine.run)
        thread.start()
        assert [one.result()[0] for one in waiting] == [503] * 4
        assert client.completion("ab") == sampled("ab")
        engine.stop()
        thread.join()
        assert client.ask("/v1/completions", PROMPT)[0] == 503


@pytest.mark.wide("kills", quick=["streamed"])
@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
def test_nobody_computes_for_a_client_that_has_gone(streams: bool) -> None:
    with serving(replace(LIMITS, context=60, max_tokens=50)) as (client, engine):
        begun = threading.Event()
        take, engine._take = engine._take, lambda new: (begun.set(), time.sleep(0.1), take(new))  # type: ignore[method-assign]
        connection = http.client.HTTPConnection("127.0.0.1", client.port)
        body = json.dumps({"prompt": "ab", "max_tokens": 50, "stream": streams})
        connection.request("POST", "/v1/completions", body)
        assert begun.wait(20)
        if streams:
            connection.getresponse().close()
        connection.close()
        idle(engine)
        assert engine.num_tokens < 50


@pytest.mark.wide("site")
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
def test_the_page_shows_answers_and_refusals_in_a_browser(tmp_path: Path) -> None:
    with serving(tokenizer=Chatting()) as (client, _):
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=200000", "--dump-dom"]
        words += ["--disable-background-networking", "--no-first-run", f"--user-data-dir={tmp_path}"]
        command = [str(BROWSER), *words, f"http://127.0.0.1:{client.port}/tried"]
        page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert 'data-tried="yes"' in page
    answer = html.escape(sampled("u:hi\na:", 7), quote=False)
    assert f'<span class="answer">{answer}</span>' in page
    assert "tokens, and the model's context is 64</div>" in page
    assert '<h1 id="name">tiny</h1>' in page
