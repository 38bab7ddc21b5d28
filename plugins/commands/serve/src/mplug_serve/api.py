"""The interface of OpenAI over HTTP: routes, limits, and the forms of answers."""

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mplug_sampling import Sampling, sample_key
from mplug_sampling.text import Text
from mplug_serve.engine import Answer, Engine, Event, random_seed
from mplug_serve.limits import Limits
from mplug_serve.requests import Asked, Chat, Completion, Refused, parsed

KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
REASONS = {"end": "stop", "stop": "stop", "length": "length"}
"""Why a text ended -> the same in the words of OpenAI."""
CHECK = 1.0
"""Seconds after which the server asks again whether a client is still there."""
Encode = Callable[[str], Sequence[int]]
EncodeChat = Callable[[Sequence[dict[str, str]]], Sequence[int]]


@dataclass(frozen=True)
class Served:
    """The model that the server offers: its name, its tokenizer, the tokens that end a text, its vocabulary."""

    name: str
    tokenizer: Any
    encode: Encode
    encode_chat: EncodeChat | None
    ends: frozenset[int]
    vocab_size: int | None
    loads_from: Path | None = None
    """Requests may load weights from folders in this one; None: they may not."""


def application(served: Served, engine: Engine, limits: Limits, key: str | None) -> Starlette:
    """The server's routes."""
    server = _Server(served, engine, limits, key)
    routes = [
        Route("/", server.page),
        Route("/health", server.health),
        Route("/v1/models", server.guarded(server.models)),
        Route("/v1/completions", server.guarded(server.completions), methods=["POST"]),
        Route("/v1/chat/completions", server.guarded(server.chats), methods=["POST"]),
        Route("/update_weights_from_disk", server.guarded(server.load), methods=["POST"]),
    ]

    async def other(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 500)
        allowed = (getattr(error, "headers", None) or {}).get("Allow")
        use = f"; use {allowed}" if allowed else ""
        return refusal(Refused(status, f"{request.method} {request.url.path} is no request of this server{use}"))

    return Starlette(routes=routes, exception_handlers={404: other, 405: other})


def refusal(refused: Refused) -> JSONResponse:
    """An error in the form of OpenAI."""
    kind = KINDS.get(refused.status, "server_error" if refused.status >= 500 else "invalid_request_error")
    error = {"message": refused.message, "type": kind, "param": None, "code": None}
    headers = {"Retry-After": "1"} if refused.status == 503 else None
    return JSONResponse({"error": error}, refused.status, headers)


class _Server:
    """The handlers of requests."""

    def __init__(self, served: Served, engine: Engine, limits: Limits, key: str | None) -> None:
        self.served, self.engine, self.limits, self.key = served, engine, limits, key
        self.created = int(time.time())

    def guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """The handler of requests with the key; what it refuses becomes an answer."""

        async def guard(request: Request) -> Response:
            try:
                self._check_key(request)
                return await handler(request)
            except Refused as refused:
                return refusal(refused)

        return guard

    def _check_key(self, request: Request) -> None:
        if self.key is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.key}".encode()):
            raise Refused(401, "the key is missing or wrong; send it in the header 'Authorization: Bearer KEY'")

    async def page(self, request: Request) -> Response:
        """A page to try the model."""
        text = files("mplug_serve").joinpath("page.html").read_text("utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": "default-src 'self' 'unsafe-inline'"})

    async def health(self, request: Request) -> Response:
        """Whether the server computes, and how much it has to do."""
        is_well = self.engine.failure is None
        return JSONResponse({"status": "ok" if is_well else "failed", **self.engine.load}, 200 if is_well else 503)

    async def models(self, request: Request) -> Response:
        """The one model of the server."""
        model = {"id": self.served.name, "object": "model", "created": self.created, "owned_by": "mplug"}
        details = {"max_model_len": self.limits.context, "chat": self.served.encode_chat is not None}
        return JSONResponse({"object": "list", "data": [{**model, **details}]})

    async def completions(self, request: Request) -> Response:
        """Continue a text."""
        asked = parsed(Completion, await self._body(request))
        if asked.logprobs:
            raise Refused(400, "'logprobs' above 0 is not supported; 0 gives the log-probability of each token alone")
        if asked.stream and (asked.logprobs is not None or asked.return_token_ids):
            raise Refused(400, "'logprobs' and 'return_token_ids' belong to whole answers; leave out 'stream'")
        if isinstance(asked.prompt, list):
            prompt: Sequence[int] = asked.prompt
            size = self.served.vocab_size or self.engine.lanes.vocab_size
            if max(prompt) >= size:
                raise Refused(400, f"'prompt' has the token {max(prompt)}, and the vocabulary has {size} tokens")
        else:
            prompt = await asyncio.to_thread(self.served.encode, asked.prompt)
        return await self._answered(request, asked, prompt, asked.max_tokens, _Completions)

    async def chats(self, request: Request) -> Response:
        """Answer a conversation."""
        asked = parsed(Chat, await self._body(request))
        encode = self.served.encode_chat
        if encode is None:
            raise Refused(400, "the model has no chat template; send its whole prompt to /v1/completions")
        try:
            prompt = await asyncio.to_thread(encode, asked.plain())
        except Exception as error:  # a template is a program of the model's author, and raises what it wants
            raise Refused(400, f"the chat template refuses the messages: {error}") from None
        return await self._answered(request, asked, prompt, asked.max_completion_tokens or asked.max_tokens, _Chats)

    async def load(self, request: Request) -> Response:
        """Load the weights of a folder, when the texts that run have ended. The form is that of SGLang."""
        asked, parent = await self._body(request), self.served.loads_from
        if parent is None:
            raise Refused(400, "this server loads no weights on request; start it with --load-from FOLDER")
        path = asked.get("model_path") if isinstance(asked, dict) else None
        if not isinstance(path, str) or not path or "\0" in path:
            raise Refused(400, "'model_path' must be the path of a folder")
        folder = Path(path).resolve()
        if not folder.is_relative_to(parent.resolve()):
            raise Refused(400, f"'{path}' is not in '{parent}', from which this server loads weights (--load-from)")
        await asyncio.wrap_future(self.engine.load_folder(str(folder)))
        return JSONResponse({"success": True, "message": f"the weights are those of '{path}'"})

    async def _body(self, request: Request) -> Any:
        """The JSON of a request; Refused if it is too long, too slow, or no JSON."""
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > self.limits.max_body:
                        raise Refused(413, f"the body has more than {self.limits.max_body} bytes")
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {self.limits.seconds:g} s") from None
        except ClientDisconnect:
            raise Refused(400, "the client has gone") from None
        try:
            found = json.loads(body)
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Refused(400, "the body has half of a surrogate pair, which is no character") from None
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is no JSON: {error}") from None
        return found

    async def _answered(
        self, request: Request, asked: Asked, prompt: Sequence[int], wanted: int | None, form: "type[_Form]"
    ) -> Response:
        """Submit the answers of a request, and send them in a form: streamed, or whole."""
        self._check(asked, prompt, wanted)
        room = self.limits.context - len(prompt)
        most = min(wanted or self.limits.max_tokens, room)
        events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        loop, deadline = asyncio.get_running_loop(), time.monotonic() + self.limits.seconds
        seed = random_seed() if asked.seed is None else asked.seed

        def sender(index: int) -> Callable[[Event], None]:
            return lambda event: _call_soon(loop, events.put_nowait, (index, event))

        is_scored = isinstance(asked, Completion) and asked.logprobs is not None
        sampling = Sampling(asked.temperature, asked.top_k, asked.top_p, 0, self.served.vocab_size)
        texts = [Text(self.served.tokenizer, prompt, self.served.ends, asked.stop) for _ in range(asked.n)]
        answers = [
            Answer(tuple(prompt), sampling, sample_key(seed, index), most, text, sender(index), deadline, is_scored)
            for index, text in enumerate(texts)
        ]
        self.engine.submit(answers)
        made = form(self.served.name, len(prompt), texts)
        parts = self._parts(request, answers, events)
        if asked.stream:
            has_usage = asked.stream_options is not None and asked.stream_options.include_usage
            first = await anext(parts)  # an answer that never begins has a status of its own
            return StreamingResponse(_streamed(made, first, parts, has_usage), media_type="text/event-stream")
        whole, ended = [""] * asked.n, [""] * asked.n
        async for index, event in parts:
            whole[index] += event.text
            ended[index] = event.ended
        found = made.whole(whole, ended)
        if isinstance(asked, Completion):
            for choice, answer in zip(found["choices"], answers, strict=True):
                choice |= _more(asked, answer, self.served.tokenizer)
        return JSONResponse(found)

    def _check(self, asked: Asked, prompt: Sequence[int], wanted: int | None) -> None:
        """Refuse what the model or the server's limits do not allow."""
        if asked.model is not None and asked.model != self.served.name:
            raise Refused(404, f"there is no model '{asked.model}'; this server has '{self.served.name}'")
        context, most = self.limits.context, self.limits.max_tokens
        if not prompt:
            raise Refused(400, "the prompt has no token")
        if len(prompt) >= context:
            raise Refused(400, f"the prompt has {len(prompt)} tokens, and the model's context is {context}")
        if wanted is not None and wanted > most:
            raise Refused(400, f"the answer may have {most} tokens, not {wanted}")
        if wanted is not None and len(prompt) + wanted > context:
            raise Refused(
                400, f"{len(prompt)} tokens of the prompt and {wanted} of the answer exceed the context of {context}"
            )
        if asked.n > self.limits.lanes:
            raise Refused(400, f"n={asked.n} is more than the server computes together ({self.limits.lanes})")

    async def _parts(
        self, request: Request, answers: Sequence[Answer], events: "asyncio.Queue[tuple[int, Event]]"
    ) -> AsyncIterator[tuple[int, Event]]:
        """The parts of all answers; Refused if one has none. Nobody computes for a client that has gone."""
        left, asked = len(answers), time.monotonic()
        try:
            while left:
                if time.monotonic() - asked > CHECK:
                    if await request.is_disconnected():
                        raise Refused(400, "the client has gone")
                    asked = time.monotonic()
                try:
                    index, event = await asyncio.wait_for(events.get(), CHECK)
                except TimeoutError:
                    continue
                if event.refused is not None:
                    raise event.refused
                left -= event.ended != ""
                yield index, event
        finally:
            if left:
                self.engine.cancel(answers)


def _more(asked: Completion, answer: Answer, tokenizer: Any) -> dict[str, Any]:
    """The tokens of an answer, with the one that ends it, and their log-probabilities at the request's temperature."""
    found: dict[str, Any] = {"token_ids": answer.taken} if asked.return_token_ids else {}
    if asked.logprobs is not None:
        texts = [tokenizer.decode([token]) for token in answer.taken]
        offsets = [*accumulate(map(len, texts[:-1]), initial=0)]
        scores = {"tokens": texts, "token_logprobs": answer.log_probabilities, "top_logprobs": None}
        found["logprobs"] = {**scores, "text_offset": offsets}
    return found


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], value: Any) -> None:
    """Call a function in the loop of the server, unless that has ended."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, value)


async def _streamed(
    form: "_Form", first: tuple[int, Event], parts: AsyncIterator[tuple[int, Event]], has_usage: bool
) -> AsyncIterator[str]:
    """The lines of a stream. A refusal in its middle is its last line."""

    async def all_parts() -> AsyncIterator[tuple[int, Event]]:
        yield first
        async for part in parts:
            yield part

    begun = set[int]()
    try:
        async for index, event in all_parts():
            for chunk in form.chunks(index, event, is_first=index not in begun):
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
            begun.add(index)
        if has_usage:
            yield f"data: {json.dumps({**form.head(form.chunk_object), 'choices': [], 'usage': form.usage()})}\n\n"
        yield "data: [DONE]\n\n"
    except Refused as refused:
        yield f"data: {bytes(refusal(refused).body).decode()}\n\n"
    finally:
        await parts.aclose()  # type: ignore[attr-defined]


class _Form:
    """How answers of a request are written."""

    prefix = whole_object = chunk_object = ""

    def __init__(self, model: str, num_prompt: int, texts: Sequence[Text]) -> None:
        self.model, self.num_prompt, self.texts = model, num_prompt, texts
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())

    def head(self, name: str) -> dict[str, Any]:
        """What answers and their parts begin with."""
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def usage(self) -> dict[str, int]:
        """Numbers of tokens."""
        made = sum(text.num_tokens for text in self.texts)
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": made,
            "total_tokens": self.num_prompt + made,
        }

    def whole(self, texts: Sequence[str], ended: Sequence[str]) -> dict[str, Any]:
        """A whole answer."""
        choices = [
            {"index": index, **self.content(text), "logprobs": None, "finish_reason": REASONS[reason]}
            for index, (text, reason) in enumerate(zip(texts, ended, strict=True))
        ]
        return {**self.head(self.whole_object), "choices": choices, "usage": self.usage()}

    def chunks(self, index: int, event: Event, *, is_first: bool) -> list[dict[str, Any]]:
        """The parts of a stream for an event."""
        found = [self.part(event.text, is_first=is_first)] if event.text or is_first or not event.ended else []
        choices = [{"index": index, **one, "finish_reason": None} for one in found]
        if event.ended:
            choices.append({"index": index, **self.part("", is_first=False), "finish_reason": REASONS[event.ended]})
        return [{**self.head(self.chunk_object), "choices": [choice]} for choice in choices]

    def content(self, text: str) -> dict[str, Any]:
        """The text of a whole answer."""
        raise NotImplementedError

    def part(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """The text of a part of an answer."""
        raise NotImplementedError


class _Completions(_Form):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def part(self, text: str, *, is_first: bool) -> dict[str, Any]:
        return {"text": text}


class _Chats(_Form):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def part(self, text: str, *, is_first: bool) -> dict[str, Any]:
        content = {"content": text} if text or is_first else {}
        return {"delta": {**({"role": "assistant"} if is_first else {}), **content}}
