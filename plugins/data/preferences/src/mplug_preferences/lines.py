"""Reads pairs of answers from JSON lines in the forms of TRL: texts or messages, with or without a prompt."""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from mplug import MARGINS, REFERENCE, UsageError
from mplug_tokenization.conversations import message_fault
from mplug_tokenization.json_lines import find_files, is_held_out, read_values

FORM = '{"prompt": ..., "chosen": ..., "rejected": ...}'
OF_REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")
"""The fields with the log-probabilities of both answers under a reference, as TRL writes them."""
OF_MARGIN = ("margin",)
"""The field with the margin of a pair, as TRL writes it."""
Answer = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Preference:
    """A prompt and two answers: texts, or lists of messages.

    `numbers` are those that the line has beside them, by the entry of micro batches: for the chosen and for the
    rejected answer. They are log-probabilities under a reference, or a margin, which the chosen answer has.
    """

    where: str
    prompt: Answer
    chosen: Answer
    rejected: Answer
    tools: Any = None
    numbers: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def held_out(self, percent: float) -> bool:
        """Whether it is for validation, by a hash of its prompt: all pairs of a prompt are in the same split."""
        return is_held_out(self.prompt, percent)


def of_split(
    split: str, path: str, validation_path: str | None, percent: float, numbers: Container[str]
) -> Iterator[Preference]:
    """The pairs of a split, in the order of the files. `numbers` are the entries with numbers of the lines."""
    if validation_path is not None:
        path = validation_path if split == "validation" else path
        yield from read_preferences(find_files(path), numbers)
        return
    for pair in read_preferences(find_files(path), numbers):
        if pair.held_out(percent) == (split == "validation"):
            yield pair


def check_files(path: str, field: str, numbers: Container[str]) -> None:
    """Read the first pair of each file of `field`; UsageError if one is wrong or if there is none at all."""
    first = [next(read_preferences([file], numbers), None) for file in find_files(path, field)]
    if not any(first):
        raise UsageError(f"{field} '{path}' has no pair of answers; set {field} to files with lines {FORM}")


def first_answer(path: str) -> Answer | None:
    """The first chosen answer of files; None if they cannot be read, because they may have moved since a run."""
    try:
        first = next(read_preferences(find_files(path)), None)
    except UsageError:
        return None
    return None if first is None else first.chosen


def read_preferences(files: list[Path], numbers: Container[str] = ()) -> Iterator[Preference]:
    """Every pair of the files, in order; UsageError names the first line without a valid one."""
    for where, record in read_values(files):
        yield _preference(record, where, numbers)


def _preference(record: Any, where: str, numbers: Container[str]) -> Preference:
    found = record if isinstance(record, dict) else {}
    chosen, rejected = (_answer(found.get(name), name, where) for name in ("chosen", "rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise UsageError(f"{where} has a text and a list of messages as 'chosen' and 'rejected'; write both alike")
    prompt = found.get("prompt")
    if isinstance(prompt, str | list) and isinstance(prompt, str) == isinstance(chosen, str):
        prompt = _answer(prompt, "prompt", where)
    elif prompt is None or isinstance(prompt, str):  # a text beside messages repeats what these begin with
        prompt, chosen, rejected = _without_prefix(chosen, rejected)
    else:
        raise UsageError(f"{where} has a 'prompt' of type {type(prompt).__name__}; write it as 'chosen' is written")
    return Preference(where, prompt, chosen, rejected, found.get("tools"), _numbers(found, where, numbers))


def _answer(value: Any, name: str, where: str) -> Any:
    """A text or valid messages."""
    if not isinstance(value, str | list):
        kind = "no" if value is None else f"a value of type {type(value).__name__} as"
        raise UsageError(f"{where} has {kind} '{name}'; write each line as {FORM}, of texts or of lists of messages")
    for number, message in enumerate(value if isinstance(value, list) else (), start=1):
        if fault := message_fault(message):
            raise UsageError(f"{where}, message {number} of '{name}', {fault}")
    return value


def _without_prefix(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """(the common beginning, the rest of both); a text's answer keeps the space before its first word, as in TRL."""
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    if isinstance(chosen, str) and length and chosen[length - 1] == " ":
        length -= 1
    return chosen[:length], chosen[length:], rejected[length:]


def _numbers(record: Mapping[str, Any], where: str, wanted: Container[str]) -> dict[str, tuple[float, float]]:
    """The wanted numbers of a line, for both answers."""
    found = dict[str, tuple[float, float]]()
    if REFERENCE in wanted:
        remedy = "use the first weights as the reference (objectives.dpo.reference=first, data.reference=false)"
        first, second = (_number(record, name, where, "reference", remedy) for name in OF_REFERENCE)
        found[REFERENCE] = first, second
    if MARGINS in wanted:
        found[MARGINS] = _number(record, *OF_MARGIN, where, "margin", "train without margins (data.margin=false)"), 0.0
    return found


def _number(record: Mapping[str, Any], name: str, where: str, setting: str, remedy: str) -> float:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(
            f"{where} has no number '{name}', which data.{setting}=true reads from every line; add it, or {remedy}"
        )
    return float(value)


def messages_of(answer: Answer) -> Sequence[Mapping[str, Any]]:
    """The messages of an answer; none if it is a text."""
    return () if isinstance(answer, str) else answer
