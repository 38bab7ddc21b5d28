"""Functions of rewards for the tests."""

import math
import os
import signal
import time


def share_of_a(completions: list[str], **columns: object) -> list[float]:
    """The share of tokens from 'a' to 'm': what a model can learn in a few steps."""
    print("what functions print is no answer")
    return [sum("a" <= one <= "m" for one in text) / max(len(text), 1) for text in completions]


def by_answer(prompts: list[str], completions: list[str], answer: list[str], **columns: object) -> list[float | None]:
    """1 for the answer of the line, None for an empty text."""
    return [None if not text else float(text == right) for text, right in zip(completions, answer, strict=True)]


def length(completions: list[str], **columns: object) -> list[float]:
    return [float(len(text)) for text in completions]


def of_messages(completions: list[list[dict[str, str]]], **columns: object) -> list[float]:
    return [float(len(answer[0]["content"])) for answer in completions]


def failing(completions: list[str], **columns: object) -> list[float]:
    raise KeyError("no such thing")


def too_few(completions: list[str], **columns: object) -> list[float]:
    return [1.0]


def infinite(completions: list[str], **columns: object) -> list[float]:
    return [-math.inf] * len(completions)


def endless(completions: list[str], **columns: object) -> list[float]:
    if any("slow" in text for text in completions):
        time.sleep(600)
    return [1.0] * len(completions)


def dying(completions: list[str], **columns: object) -> list[float]:
    os._exit(3)


def texts(completions: list[str], **columns: object) -> list[str]:
    return ["1.0"] * len(completions)


def unknown(completions: list[str], **columns: object) -> list[float]:
    return [float("nan")] * len(completions)


def one_number(completions: list[str], **columns: object) -> float:
    return 1.0


def interrupted(completions: list[str], **columns: object) -> list[float]:
    """Rewards, although the signals of a run that is stopped arrive."""
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    return [float(os.getpgid(0) == os.getpid())] * len(completions)
