"""A server that stops or fails, and connections without requests."""

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress

import pytest
from mplug_bytes import ByteTokenizer
from sampled import CONTEXT, built

from mplug_sampling import Lanes

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
from mplug_serve import connections
from mplug_serve.api import Served, application
from mplug_serve.connections import Server
from mplug_serve.engine import Engine
from mplug_serve.requests import Refused
from served import GPT, LIMITS, PROMPT, Client, serving


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
