"""A server in this process, its clients, and the answers that sampling gives."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest
from mplug_bytes import ByteTokenizer
from sampled import CONTEXT, FAMILIES, built, texts

from mplug_sampling import Lanes, Sampling, Text

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
from mplug_serve.api import Served, application  # noqa: E402
from mplug_serve.engine import Engine  # noqa: E402
from mplug_serve.limits import Limits  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import HTMLResponse, Response  # noqa: E402
from starlette.routing import Route  # noqa: E402

LIMITS = Limits(context=CONTEXT, lanes=3, queue=20, max_tokens=40, max_body=4000, seconds=60, grace=5)
GPT: dict[str, Any] = {**FAMILIES["gpt"], "model.vocab_size": 257}
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


def sampled(prompt: str, num_tokens: int = 12, sampling: Sampling = Sampling(0.0)) -> str:  # noqa: B008
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


PROMPT = {"prompt": "ab"}
