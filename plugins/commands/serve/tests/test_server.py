"""The server: its answers are those of sampling, and everything else that a client may send has a clear status."""

import html
import http.client
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from mplug_bytes import ByteTokenizer
from sampled import CONTEXT, FAMILIES, built, texts

from mplug import RunError, UsageError
from mplug_sampling import Lanes, Ranks, Sampling, Text, complete, sample_key
from mplug_testing import run_workers

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
from mplug_serve import connections, work  # noqa: E402
from mplug_serve.api import Served, application  # noqa: E402
from mplug_serve.connections import Server  # noqa: E402
from mplug_serve.engine import Answer, Engine, Event, follow  # noqa: E402
from mplug_serve.limits import Limits  # noqa: E402
from mplug_serve.requests import Refused  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import HTMLResponse, Response  # noqa: E402
from starlette.routing import Route  # noqa: E402

LIMITS = Limits(context=CONTEXT, lanes=3, queue=20, max_tokens=40, max_body=4000, seconds=60, grace=5)
GPT: dict[str, Any] = {**FAMILIES["gpt"], "model.vocab_size": 257}
KEY = "a key"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TRIAL = """
<script>
  const until = async (condition) => { while (!condition()) await new Promise(done => setTimeout(done, 20)) };
  const ask = async (prompt) => {
    at("prompt").value = prompt;
    at("form").requestSubmit();
    await until(() => !at("stop").hidden);
    await until(() => at("stop").hidden);
  };
  (async () => {
    await until(() => at("mode").length === 2);
    at("temperature").value = "0";
    at("tokens").value = "7";
    await ask("hi");
    await ask("x".repeat(90));
    document.body.dataset.tried = "yes";
  })();
</script>
"""
"""What a user does on the page: two messages of a chat, the second one longer than the context."""


def tried(request: Request) -> Response:
    """The page, with a user."""
    return HTMLResponse(files("mplug_serve").joinpath("page.html").read_text("utf-8") + TRIAL)


class Chatting(ByteTokenizer):
    """Bytes with a chat template."""

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        if messages[0]["role"] not in ("user", "system"):
            raise ValueError("a conversation begins with 'user'")
        return self.encode("".join(f"{one['role'][0]}:{one['content']}\n" for one in messages) + "a:")


class Client:
    """Requests to a server on the loopback."""

    def __init__(self, port: int, key: str | None = None) -> None:
        self.port, self.headers = port, {} if key is None else {"Authorization": f"Bearer {key}"}

    def ask(self, path: str, body: Any = None, *, method: str | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method or ("GET" if data is None else "POST"), path, data, self.headers)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        is_json = response.headers["Content-Type"] == "application/json"
        return response.status, json.loads(text) if is_json else text

    def completion(self, prompt: str, **fields: Any) -> str:
        status, found = self.ask("/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 12, **fields})
        assert status == 200, found
        return found["choices"][0]["text"]


@contextmanager
def serving(
    limits: Limits = LIMITS, key: str | None = None, tokenizer: Any = None, started: bool = True
) -> Iterator[tuple[Client, Engine]]:
    _, sampler = built(GPT)
    engine = Engine(Lanes(sampler, limits.lanes, limits.context), limits.queue, lambda commands: commands)
    tokenizer = tokenizer or ByteTokenizer()
    served = Served("tiny", tokenizer, tokenizer.encode, getattr(tokenizer, "encode_chat", None), frozenset(), 256)
    app = application(served, engine, limits, key)
    app.router.routes.append(Route("/tried", tried))
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    threads = [threading.Thread(target=server.run, daemon=True)]
    if started:
        threads.append(threading.Thread(target=engine.run, daemon=True))
    for thread in threads:
        thread.start()
    while not server.started:
        time.sleep(0.01)
    yield Client(server.servers[0].sockets[0].getsockname()[1], key), engine
    engine.stop()
    server.should_exit = True
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def idle(engine: Engine) -> None:
    """Wait until all lanes are free."""
    deadline = time.monotonic() + 20
    while engine.load["running"] or engine.load["waiting"]:
        assert time.monotonic() < deadline, engine.load
        time.sleep(0.01)


def sampled(prompt: str, num_tokens: int = 12, sampling: Sampling = Sampling(0.0)) -> str:  # noqa: B008 (frozen)
    """The text that `mplug generate` gives."""
    _, sampler = built(GPT)
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(prompt)
    (found,) = texts(sampler, [tokens], sampling=replace(sampling, vocab_size=256), num_tokens=num_tokens)
    text = Text(tokenizer, tokens, ())
    for token in found:
        text.take(token)
    text.finish()
    return text.text


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


PROMPT = {"prompt": "ab"}
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


@contextmanager
def stoppable(seconds: float, grace: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Client, Engine, Server]]:
    """The server of the command, in a thread, which receives no signals."""
    monkeypatch.setattr(Server, "capture_signals", lambda _: nullcontext())
    _, sampler = built(GPT)
    engine = Engine(Lanes(sampler, 3, CONTEXT), 20, lambda commands: commands)
    tokenizer = ByteTokenizer()
    app = application(Served("tiny", tokenizer, tokenizer.encode, None, frozenset(), 256), engine, LIMITS, None)
    server, listening = Server(app, seconds, grace, engine.stop), socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    threads = [threading.Thread(target=engine.run), threading.Thread(target=server.run, args=([listening],))]
    for thread in threads:
        thread.start()
    yield Client(port), engine, server
    server.should_exit = True
    threads[1].join(20)
    engine.stop()
    threads[0].join(20)
    assert not any(thread.is_alive() for thread in threads)


def test_a_stop_ends_answers_in_time_and_cuts_a_client_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "LINGER", 0.5)
    with stoppable(60, 0.3, monkeypatch) as (client, engine, server), ThreadPoolExecutor(1) as clients:
        take, engine._take = engine._take, lambda new: (time.sleep(0.1), take(new))  # type: ignore[method-assign]
        asked = clients.submit(client.ask, "/v1/completions", {**PROMPT, "max_tokens": 40})
        half = socket.create_connection(("127.0.0.1", client.port))
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n{")
        while not engine.load["running"]:
            time.sleep(0.01)
        began = time.monotonic()
        server.should_exit = True
        status, answer = asked.result(20)
        assert (status, "stopped before the answer had ended" in answer["error"]["message"]) == (503, True)
        half.settimeout(20)
        with suppress(ConnectionResetError):
            assert half.recv(100) == b""
        half.close()
        assert time.monotonic() - began < 3
    assert caplog.text == ""


def test_a_connection_without_a_request_is_closed_and_one_with_requests_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with stoppable(0.6, 0, monkeypatch) as (client, _, _):
        silent = socket.create_connection(("127.0.0.1", client.port))
        silent.sendall(b"POST /v1/comp")
        silent.settimeout(0.1)
        busy = http.client.HTTPConnection("127.0.0.1", client.port, timeout=20)
        closed, deadline = False, time.monotonic() + 10
        while not closed and time.monotonic() < deadline:
            busy.request("GET", "/health")
            assert busy.getresponse().read()
            with suppress(TimeoutError):
                closed = silent.recv(100) == b""
        assert closed
        socket_of_busy = busy.sock
        busy.request("GET", "/health")
        assert busy.getresponse().read()
        assert busy.sock is socket_of_busy
        busy.close()
        silent.close()


def of_rank(settings: dict[str, Any]) -> list[str]:
    """Four texts in two lanes, whose pages have no room for two whole texts."""
    run, sampler = built(settings)
    lanes = Lanes(sampler, 2, 20, Ranks(run, sampler), cache_tokens=20, page_size=4)

    def exchange(commands: Any) -> Any:
        values = [list(commands)]
        dist.broadcast_object_list(values, 0)
        return values[0]

    if run.rank:
        follow(lanes, exchange)
        return []
    engine = Engine(lanes, 20, exchange)
    thread = threading.Thread(target=engine.run)
    tokenizer, found = ByteTokenizer(), ["", "", "", ""]

    def send(index: int, event: Event) -> None:
        found[index] += event.text

    texts_of = [Text(tokenizer, tokenizer.encode("ab"), ()) for _ in found]
    engine.submit(
        [
            Answer(
                *(tuple(tokenizer.encode("ab")), Sampling(0.0, vocab_size=256), sample_key(0), 12, text),
                *(lambda event, index=index: send(index, event), time.monotonic() + 60),
            )
            for index, text in enumerate(texts_of)
        ]
    )
    thread.start()
    while engine.num_answers < 4:
        time.sleep(0.01)
    engine.stop()
    thread.join()
    assert engine.load["put_back"] > 0
    return found


def test_ranks_of_tensor_parallelism_compute_what_the_first_one_commands() -> None:
    settings = {**GPT, "parallel.layout": "tp2", "parallel.tp.sequence_parallel": False}
    assert run_workers(2, of_rank, settings)[0] == [sampled("ab")] * 4


def test_tokens_have_the_log_probabilities_of_the_model() -> None:
    """The prompt is a text or its tokens; the numbers come back, with the token that ends the text."""
    prompt, whole = ByteTokenizer().encode("ab"), {"temperature": 0.7, "seed": 3, "max_tokens": 9}
    with serving() as (client, _):
        asked = {"prompt": prompt, "logprobs": 0, "return_token_ids": True, **whole}
        (choice,) = client.ask("/v1/completions", asked)[1]["choices"]
        assert client.ask("/v1/completions", {"prompt": "ab", **whole})[1]["choices"][0]["text"] == choice["text"]
        _, sampler = built(GPT)
        sampling = Sampling(0.7, vocab_size=256)
        (text,) = complete(Lanes(sampler, 3, CONTEXT), [prompt], [sample_key(3)], 9, sampling, ())
        assert choice["token_ids"] == text.tokens
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(text.log_probabilities, rel=1e-9)
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == 9
        for wrong, sentence in (({"logprobs": 2}, "'logprobs'"), ({"stream": True}, "leave out 'stream'")):
            status, found = client.ask("/v1/completions", {**asked, **wrong})
            assert status == 400
            assert sentence in found["error"]["message"]
        status, found = client.ask("/v1/completions", {**asked, "prompt": [999]})
        assert (status, "the vocabulary has 256 tokens" in found["error"]["message"]) == (400, True)


def test_weights_are_loaded_when_the_texts_that_run_have_ended(tmp_path: Path) -> None:
    with serving() as (client, engine), ThreadPoolExecutor(4) as clients:
        assert client.ask("/update_weights_from_disk", {"model_path": str(tmp_path)})[0] == 400
        running: list[int] = []

        def load(folder: str) -> None:
            running.append(engine.load["running"])
            if folder == "other":
                raise UsageError("it is another model")

        engine.load_weights = load
        asked = [clients.submit(client.completion, "ab", max_tokens=30) for _ in range(4)]
        while not engine.load["running"]:
            time.sleep(0.001)
        engine.load_folder("some").result(20)
        with pytest.raises(Refused, match="it is another model"):
            engine.load_folder("other").result(20)
        assert running == [0, 0]
        assert {one.result() for one in asked} == {client.completion("ab", max_tokens=30)}


def test_a_folder_whose_client_has_gone_is_not_loaded_and_weights_loaded_in_part_end_the_server() -> None:
    with serving(started=False) as (_, engine):
        loaded: list[str] = []

        def load(folder: str) -> None:
            loaded.append(folder)
            raise RunError("the disk is gone")

        engine.load_weights = load
        assert engine.load_folder("gone").cancel()
        waiting = engine.load_folder("broken")
        with pytest.raises(RunError, match="the disk is gone"):
            engine.run()
        assert loaded == ["broken"]
        with pytest.raises(Refused, match="could not be loaded whole"):
            waiting.result(0)


def test_only_texts_that_were_put_back_begin_while_weights_wait() -> None:
    with serving(started=False) as (_, engine):
        text = Text(ByteTokenizer(), [1], frozenset())
        old, new = (Answer((1,), Sampling(0.0), 0, 9, text, [].append, 1e9) for _ in range(2))
        old.taken.append(2)
        engine.submit([new])
        engine._texts.waiting.appendleft(old)
        engine.load_folder("some")
        engine._step()
        assert [*engine._texts.running.values()] == [old]
        assert [*engine._texts.waiting] == [new]


def test_a_folder_is_refused_before_a_weight_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, sampler = built(GPT)
    for folder, sentence in ((tmp_path / "none", "is no folder"), (tmp_path, "no installed format reads")):
        with pytest.raises(UsageError, match=sentence):
            work.load_weights(run, sampler, str(folder))
    with pytest.raises(UsageError, match=r"cannot be read: .*too long"):
        work.load_weights(run, sampler, str(tmp_path / ("x" * 5000)))

    def fails(*_: Any) -> None:
        raise UsageError("two copies differ")

    monkeypatch.setattr(work, "_refuse_folder", lambda *_: None)
    monkeypatch.setattr("mplug_pretrained.public_load.load_public_for_inference", fails)
    with pytest.raises(RunError, match="loaded in part: two copies differ"):
        work.load_weights(run, sampler, str(tmp_path))


def test_a_failure_of_the_model_ends_all_answers_and_is_reported() -> None:
    with serving(started=False) as (client, engine), ThreadPoolExecutor(1) as clients:
        engine.lanes.launch = lambda: [1, 2, 3][5]  # type: ignore[method-assign,return-value]
        asked = clients.submit(client.ask, "/v1/completions", PROMPT)
        while not engine.load["waiting"]:
            time.sleep(0.01)
        with pytest.raises(IndexError):
            engine.run()
        assert asked.result()[0] == 503
        assert client.ask("/health")[0] == 503
        with pytest.raises(Refused, match="stopping"):
            engine.submit([])
