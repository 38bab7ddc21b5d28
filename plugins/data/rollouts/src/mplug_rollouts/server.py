"""Completions of a server that speaks OpenAI's interface, such as `mplug serve` and vLLM."""

import http.client
import json
import math
import os
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from mplug import RunError, UsageError

if TYPE_CHECKING:
    from mplug_rollouts.config import ServerConfig
    from mplug_sampling import Completion

PATH = "/v1/completions"
PAUSE = 1.0
"""Seconds before the first retry of a request; each further one waits twice as long."""
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Statuses of a server that is busy or starting: the request is sent again."""


class Want(NamedTuple):
    """What is asked of the server: `temperature` 0 takes the likeliest tokens."""

    num_tokens: int
    temperature: float
    vocab_size: int
    ends: Collection[int]


class _Passing(Exception):
    """A failure that another attempt may not have."""


class Client:
    """The addresses of a server's copies, each of which receives its part of the requests."""

    def __init__(self, config: "ServerConfig") -> None:
        self.config = config
        self.headers = {"Content-Type": "application/json"}
        if config.key_variable is not None:
            key = os.environ.get(config.key_variable)
            if not key:
                raise UsageError(
                    f"data.server.key_variable names the variable '{config.key_variable}', which is not set; set it to "
                    f"the server's key"
                )
            self.headers["Authorization"] = f"Bearer {key}"

    def complete(self, prompts: Sequence[Sequence[int]], keys: Sequence[int], want: Want) -> "list[Completion]":
        """The completions of prompts, by their tokens. `keys` are the seeds of their random numbers.

        Raises RunError if the server gives no answer, or one that is no completion.
        """
        count = len(self.config.addresses)
        numbered = enumerate(zip(prompts, keys, strict=True))
        with ThreadPoolExecutor(self.config.connections * count) as threads:
            waiting = [threads.submit(self._completion, number % count, *one, want) for number, one in numbered]
            try:
                return [one.result() for one in waiting]
            finally:
                threads.shutdown(cancel_futures=True)

    def _completion(self, index: int, prompt: Sequence[int], key: int, want: Want) -> "Completion":
        """One completion, by several attempts."""
        address = self.config.addresses[index]
        body = {"prompt": [*prompt], "max_tokens": want.num_tokens, "temperature": want.temperature}
        body |= {"seed": key % 2**31, "logprobs": 0, "return_token_ids": True}
        body |= {"top_p": 1.0, "top_k": 0}  # some servers take other defaults from the folder of the model
        if self.config.model is not None:
            body["model"] = self.config.model
        return _completion_of(self._answered(address, PATH, body), want, address)

    def load(self, folder: Path) -> None:
        """Let all copies of the server load the weights of a folder, which they can read."""
        for address in self.config.addresses:
            self._answered(address, self.config.reload, {"model_path": str(folder)})

    def _answered(self, address: str, path: str, body: dict[str, Any]) -> Any:
        """The answer to a request, by several attempts; RunError without one."""
        for attempt in range(self.config.retries + 1):
            try:
                return self._answer(address, path, body)
            except _Passing as failure:
                if attempt == self.config.retries:
                    raise RunError(
                        f"the server {address} of data.server.addresses gave no answer in {attempt + 1} attempts: "
                        f"{failure}; start it, or set data.server.seconds and data.server.retries"
                    ) from failure
            time.sleep(PAUSE * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _answer(self, address: str, path: str, body: dict[str, Any]) -> Any:
        """The JSON of an answer with the status 200; _Passing if another attempt may succeed."""
        url = urlsplit(address)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.hostname or "", url.port, timeout=self.config.seconds)
        try:
            connection.request("POST", url.path.rstrip("/") + path, json.dumps(body), self.headers)
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise _Passing(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        shown = text[:300].decode(errors="replace")
        if response.status in PASSING:
            raise _Passing(f"status {response.status}: {shown}")
        if response.status != 200:
            raise RunError(f"the server {address} refuses {path} with status {response.status}: {shown}")
        try:
            return json.loads(text)
        except ValueError:
            raise RunError(f"the server {address} answers with what is no JSON: {shown}") from None


def _completion_of(answer: Any, want: Want, address: str) -> "Completion":
    """The completion of an answer; RunError with what is wrong with it."""
    from mplug_sampling import Completion

    try:
        (choice,) = answer["choices"]
        tokens, scores = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    except (KeyError, TypeError, ValueError):
        raise RunError(
            f"the answer of {address} has no 'token_ids' with 'logprobs'; use a server that supports return_token_ids, "
            f"such as mplug serve, or a newer one"
        ) from None
    if not (isinstance(tokens, list) and isinstance(scores, list) and 0 < len(tokens) <= want.num_tokens):
        raise RunError(f"the answer of {address} has not between 1 and {want.num_tokens} tokens")
    if len(tokens) != len(scores):
        raise RunError(f"the answer of {address} has {len(tokens)} tokens and {len(scores)} log-probabilities")
    if wrong := [one for one in tokens if type(one) is not int or not 0 <= one < want.vocab_size]:
        raise RunError(
            f"the answer of {address} has the token {wrong[0]!r}, and the tokenizer of the run has {want.vocab_size} "
            f"tokens; serve the model that trains"
        )
    if wrong := [one for one in scores if not isinstance(one, float | int) or not math.isfinite(one) or one > 1e-3]:
        raise RunError(f"the answer of {address} has the log-probability {wrong[0]!r}, which is none")
    found = Completion([*tokens], [float(one) for one in scores])
    end = next((place for place, token in enumerate(tokens) if token in want.ends), None)
    if end is None:
        found.truncated = True
        if len(tokens) < want.num_tokens:
            raise RunError(
                f"an answer of {address} ends after {len(tokens)} of {want.num_tokens} tokens without an end token of "
                f"the run; let the server end texts as the run does (by the template, or the tokenizer's end of text), "
                f"and give it the time for whole answers (mplug serve --timeout)"
            )
        return found
    return Completion(found.tokens[: end + 1], found.log_probabilities[: end + 1])
