"""The errors that end a run early (one class per cause), and the helpers that format values for their messages."""

import reprlib
from collections.abc import Iterable
from datetime import date, datetime
from typing import Any


class UsageError(Exception):
    """The user's input is wrong: exit status 2, no traceback.

    The message says what is wrong, where it was set, and what to do.
    """


class RunError(Exception):
    """The environment or the run failed (full disk, dead worker, non-finite loss): exit status 1, no traceback."""


class PluginError(RunError):
    """A plugin has a bug: it raised an exception that its contract does not allow, or broke the contract otherwise.

    The message names the plugin and the cause; the log of the rank has the traceback.
    """


class Diverged(RunError):
    """A loss or gradient norm is not finite; another attempt with the same settings would end in the same way."""


def suggest(word: str, candidates: Iterable[str]) -> str:
    """'; did you mean 'gpt'?' if a candidate is close to `word`, else the empty string."""
    import difflib  # only errors need it

    close = difflib.get_close_matches(word, list(candidates), n=5, cutoff=0.6)
    close.sort(key=lambda candidate: sorted(candidate) != sorted(word))  # swapped letters are the most likely mistake
    return f"; did you mean '{close[0]}'?" if close else ""


def listed(words: Iterable[str]) -> str:
    """Words joined for a sentence: 'a, b and c', or 'none'."""
    words = list(words)
    if not words:
        return "none"
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def counted(number: int, noun: str) -> str:
    """'1 rank', '2 ranks'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


LONGEST_SHOWN = 80
"""Maximum number of characters of a value that an error shows."""


def brief(text: str) -> str:
    """A text on one line; ` ... ` replaces the middle of a text that is longer than LONGEST_SHOWN."""
    text = " ".join(text.split())
    kept = LONGEST_SHOWN // 2 - 2
    return text if len(text) <= LONGEST_SHOWN else f"{text[:kept]} ... {text[-kept:]}"


LONGEST_TEXT = 10_000
"""Maximum number of characters of a text in a checkpoint's manifest."""


def printable(text: str, longest: int = LONGEST_TEXT) -> str:
    """A text that a terminal can show on one line.

    Characters that are not printable are escaped. A text that is then longer than `longest` is cut and ends in '...'.
    """
    escaped = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return escaped if len(escaped) <= longest else f"{escaped[: longest - 3]}..."


def quoted(value: Any) -> str:
    """The repr of a value of any size for an error message, shortened as `brief` shortens a text."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to convert very long integers to text
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, date | datetime):
        return repr(str(value))
    return brief(_SHORT.repr(value))


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = LONGEST_SHOWN


def some_names(names: Iterable[str]) -> str:
    """Names for a sentence: the first of them, and how many more there are."""
    names = sorted(names)
    shown = listed(f"'{brief(name)}'" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {counted(len(names) - 3, 'other')}"
