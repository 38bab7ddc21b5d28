"""Reads prompts from JSON lines in the forms of TRL: texts or messages, with any further columns."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mplug import UsageError
from mplug_tokenization.conversations import message_fault
from mplug_tokenization.json_lines import REMEDY, find_files, is_held_out, read_values

FORM = '{"prompt": ...}'
GIVEN = '{"prompt": ..., "completions": [{"tokens": [...], "log_probabilities": [...], "reward": 1.0}, ...]}'
OWN = ("prompt", "messages", "tools", "completions", "prompt_tokens")
"""The fields of a line that are no columns for functions of rewards."""


@dataclass(frozen=True)
class Given:
    """A completion of a line: a text or tokens, its reward, and the log-probability of each token if they are read."""

    text: str | None
    tokens: tuple[int, ...] | None
    reward: float
    log_probabilities: tuple[float, ...] | None = None
    truncated: bool = False


@dataclass(frozen=True)
class Prompt:
    """A text or messages, and the columns that functions of rewards receive."""

    where: str
    content: str | list[dict[str, Any]]
    columns: Mapping[str, Any]
    tools: Any = None
    tokens: tuple[int, ...] | None = None
    completions: tuple[Given, ...] = field(default=())


def of_split(split: str, path: str, validation_path: str | None, percent: float, given: str) -> Iterator[Prompt]:
    """The prompts of a split, in the order of the files; `given` as in `read_prompts`."""
    if validation_path is not None:
        path = validation_path if split == "validation" else path
        yield from read_prompts(find_files(path), given)
        return
    for prompt in read_prompts(find_files(path), given):
        if is_held_out(prompt.content, percent) == (split == "validation"):
            yield prompt


def check_files(path: str, field: str, given: str) -> None:
    """Read the first prompt of each file of `field`; UsageError if one is wrong or if there is none at all."""
    first = [next(read_prompts([file], given), None) for file in find_files(path, field)]
    if not any(first):
        raise UsageError(f"{field} '{path}' has no prompt; set {field} to files with lines {GIVEN if given else FORM}")


def first_content(path: str, given: str) -> str | list[dict[str, Any]] | None:
    """The first prompt of files; None if they cannot be read, because they may have moved since a run."""
    try:
        first = next(read_prompts(find_files(path), given), None)
    except UsageError:
        return None
    return None if first is None else first.content


def read_prompts(files: list[Path], given: str = "") -> Iterator[Prompt]:
    """Every prompt of the files, in order; UsageError names the first line without a valid one.

    `given`: '' for prompts alone, 'plain' for those with completions, 'scored' if these have log-probabilities too.
    """
    for where, record in read_values(files):
        yield _prompt(record, where, given)


def _prompt(record: Any, where: str, given: str) -> Prompt:
    found = record if isinstance(record, dict) else {}
    content = found.get("prompt")
    if content is None and isinstance(found.get("messages"), list):
        content = _without_answer(found["messages"])
    if not isinstance(content, str | list) or not content:
        kind = (
            "no" if content is None else "an empty" if not content else f"a value of type {type(content).__name__} as"
        )
        raise UsageError(f"{where} has {kind} 'prompt'; write each line as {FORM}, a text or a list of messages")
    for number, message in enumerate(content if isinstance(content, list) else (), start=1):
        if fault := message_fault(message):
            raise UsageError(f"{where}, message {number} of 'prompt', {fault}")
    columns = {name: value for name, value in found.items() if name not in OWN}
    completions = tuple(_completions(found, where, given)) if given else ()
    tokens = _tokens(found["prompt_tokens"], "prompt_tokens", where) if given and "prompt_tokens" in found else None
    return Prompt(where, content, columns, found.get("tools"), tokens, completions)


def _without_answer(messages: list[Any]) -> list[Any]:
    """The messages before the last answers: those that a model answers."""
    last = len(messages)
    while last and isinstance(messages[last - 1], dict) and messages[last - 1].get("role") == "assistant":
        last -= 1
    return messages[:last]


def _completions(record: Mapping[str, Any], where: str, given: str) -> Iterator[Given]:
    values = record.get("completions")
    if not isinstance(values, list) or len(values) < 2:
        raise UsageError(f"{where} has no list 'completions' of 2 or more; write each line as {GIVEN}")
    for number, value in enumerate(values, start=1):
        place = f"{where}, completion {number},"
        own = value if isinstance(value, dict) else {}
        text, reward = own.get("text"), own.get("reward")
        tokens = _tokens(own["tokens"], "tokens", place) if "tokens" in own else None
        if tokens is None and not isinstance(text, str):
            raise UsageError(f"{place} has neither 'tokens' nor a string 'text'; {REMEDY}")
        if reward is None and "reward" in own:
            reward = math.nan  # no function has rewarded it
        elif isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise UsageError(f"{place} has no number 'reward'; {REMEDY}")
        scores = None
        if given == "scored":
            scores = own.get("log_probabilities")
            if tokens is None or not isinstance(scores, list) or len(scores) != len(tokens):
                raise UsageError(
                    f"{place} has no 'log_probabilities', one for each of its 'tokens'; add them, or set "
                    f"data.log_probabilities=false and objectives.grpo.old=current"
                )
            if not all(isinstance(one, int | float) and math.isfinite(one) for one in scores):
                raise UsageError(f"{place} has 'log_probabilities' that are no finite numbers; {REMEDY}")
            scores = tuple(map(float, scores))
        yield Given(text, tokens, float(reward), scores, bool(own.get("truncated")))


def _tokens(value: Any, name: str, place: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(one) is int and one >= 0 for one in value):
        raise UsageError(f"{place} has '{name}' that is no list of token numbers; {REMEDY}")
    return tuple(value)
