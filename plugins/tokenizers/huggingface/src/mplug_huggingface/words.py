"""Byte-level BPE word by word: Python's `re` splits a text into words, and a cache maps each word to its tokens.

This is faster than the library, which spends most of its time on the alignment of every byte, even for words that it
has seen before. The tokens are the same: BPE merges within a word, so its tokens do not depend on its surroundings.
"""

import json
import re
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, models
from tokenizers.pre_tokenizers import Split

REMEMBERED = 1 << 17
"""Words per generation of the cache. It holds two generations: 60 MB of ordinary words."""
MOST_TOKENS, MOST_CHARACTERS = 16, 128
"""Limits of a word that is cached; longer words rarely recur."""
TOKEN = np.dtype("i4")

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of the pre-tokenizer ByteLevel with `use_regex`."""
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
KNOWN = (GPT2, QWEN2, LLAMA3)
"""Patterns that assign every character to a word, both in Python's `re` and in the library's Oniguruma."""

ASCII = {"L": "A-Za-z", "N": "0-9", "s": "\t-\r "}
"""Letters, numbers and white space below U+0080, as ranges; Python's own `\\s` also matches U+001C to U+001F."""
UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
PROBE = "".join(map(chr, range(128))) + " it's I'LL 'tis x1 12345 \t\n  a  \r\n\r\n -- \n;\n\n  \x1c b  "
BEYOND_ASCII = "¿Qué? 世界,½²³ \u2028\u00a0 \u3000e\u0301 it'ſ ʼſ\u0085"
"""Test texts for all distinctions of the patterns and classes; the library's splits of them are checked at run time."""

Cut = Callable[[str], Sequence[str]]
Library = Callable[[Sequence[str]], Sequence[Sequence[int]]]

BEYOND = re.compile("[\U00010000-\U0010ffff]")


def _printable() -> tuple[str, ...]:
    """The character for each byte in byte-level BPE: printable bytes map to themselves, the others from U+0100 on."""
    unchanged = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in unchanged else next(substitutes)) for byte in range(0x100))


PRINTABLE = _printable()


def _spelt(word: str) -> str:
    return "".join(map(PRINTABLE.__getitem__, word.encode()))


class Words:
    """Encodes texts like `tokenizer`, whose pre-tokenizer splits them by `pattern`, one of KNOWN."""

    def __init__(self, tokenizer: Tokenizer, pattern: str) -> None:
        names = _added_to_texts(tokenizer)
        self._added = re.compile("|".join(map(re.escape, names))) if names else None
        self._pattern, self._pre_tokenizer = pattern, tokenizer.pre_tokenizer
        self._normalizes = tokenizer.normalizer is not None
        self._memory = Memory(tokenizer.model)
        self.cut_ascii = self._checked(ASCII, PROBE)

    def encode_batch(self, texts: Sequence[str], library: Library) -> list[NDArray[Any]]:
        """The tokens of each text; texts that `_cut_for` does not support are encoded by `library`."""
        found = [self._encode(text) for text in texts]
        remaining = [number for number, tokens in enumerate(found) if tokens is None]
        if remaining:
            for number, tokens in zip(remaining, library([texts[number] for number in remaining]), strict=True):
                found[number] = np.array(tokens, dtype=TOKEN)
        return found

    def _encode(self, text: str) -> NDArray[Any] | None:
        cut = self._cut_for(text)
        if cut is None:
            return None
        return np.frombuffer(b"".join(map(self._memory.__getitem__, cut(text))), dtype=TOKEN)

    def _cut_for(self, text: str) -> Cut | None:
        """The function that splits a text, or None for texts that the library must encode.

        These contain an added token, a character beyond U+FFFF, or need normalization.
        """
        if self._added is not None and self._added.search(text):
            return None
        if text.isascii():
            return self.cut_ascii
        return None if self._normalizes or BEYOND.search(text) else self.cut

    @cached_property
    def cut(self) -> Cut | None:
        """Splits texts of characters up to U+FFFF; made for the first such text, because it takes 0.1 s."""
        return self._checked(_classes(), PROBE + BEYOND_ASCII)

    def _checked(self, classes: dict[str, str], probe: str) -> Cut | None:
        """The function that splits with these classes; None if this release of the library gives other words."""
        cut = _cutter(self._pattern, classes)
        found = [spelt for spelt, _ in self._pre_tokenizer.pre_tokenize_str(probe)]
        return cut if found == [*map(_spelt, cut(probe))] else None


class Memory(dict[str, bytes]):
    """Cache: word -> its tokens as i32 bytes; calls the model for missing words and drops words not used lately."""

    def __init__(self, model: Any) -> None:
        self._tokenize = model.tokenize
        self._before: dict[str, bytes] = {}

    def __missing__(self, word: str) -> bytes:
        tokens = self._before.get(word)
        if tokens is None:
            tokens = array(TOKEN.char, [token.id for token in self._tokenize(_spelt(word))]).tobytes()
        if len(tokens) <= MOST_TOKENS * TOKEN.itemsize and len(word) <= MOST_CHARACTERS:
            if len(self) >= REMEMBERED:  # start a new generation, keep the last one
                self._before = dict(self)
                self.clear()
            self[word] = tokens
        return tokens


def words_of(tokenizer: Tokenizer) -> Words | None:
    """An encoder that gives the tokens of the tokenizer with `encode_special_tokens`; None if that is not certain."""
    pattern = _pattern(_state(tokenizer.pre_tokenizer))
    if pattern is None or pattern not in KNOWN:
        return None
    same = (
        isinstance(tokenizer.model, models.BPE)
        and not tokenizer.model.dropout
        and all(name and name.isascii() for name in _added_to_texts(tokenizer))
        and _numbers_are_unique(tokenizer)
        and _state(tokenizer.normalizer).get("type") in (None, *UNICODE_FORMS)
        and _leaves_tokens(_state(tokenizer.post_processor))
    )
    if not same:
        return None
    words = Words(tokenizer, pattern)
    return words if words.cut_ascii is not None else None


def _added_to_texts(tokenizer: Tokenizer) -> list[str]:
    """The added tokens that may match in a text: all but special ones."""
    return [token.content for token in tokenizer.get_added_tokens_decoder().values() if not token.special]


def _numbers_are_unique(tokenizer: Tokenizer) -> bool:
    """Whether no two tokens share a number; with shared ones, releases before 0.23 match all but list only the last."""
    numbers = tokenizer.get_vocab(with_added_tokens=True).values()
    return len(set(numbers)) == len(numbers)


def _state(component: Any) -> dict[str, Any]:
    found: dict[str, Any] = {} if component is None else json.loads(component.__getstate__())
    return found


def _pattern(pre_tokenizer: dict[str, Any]) -> str | None:
    """The pattern by which a pre-tokenizer splits, if it does nothing else but byte-level spelling; else None."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    *before, last = steps or [{}]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") or len(before) > 1:
        return None
    if not before:
        return GPT2 if last.get("use_regex") else None
    split = before[0]
    options = (split.get("type"), split.get("behavior"), split.get("invert"), last.get("use_regex"))
    return split["pattern"].get("Regex") if options == ("Split", "Isolated", False, False) else None


def _leaves_tokens(post_processor: dict[str, Any]) -> bool:
    """Whether a post-processor only adds special tokens and corrects offsets."""
    kind = post_processor.get("type")
    if kind == "Sequence":
        return all(map(_leaves_tokens, post_processor["processors"]))
    if kind == "TemplateProcessing":
        return [piece["Sequence"]["id"] for piece in post_processor["single"] if "Sequence" in piece] == ["A"]
    return kind in (None, "ByteLevel")


def _cutter(pattern: str, classes: dict[str, str]) -> Cut:
    r"""A function that splits by `pattern`, one of KNOWN, with these ranges for \p{L}, \p{N} and \s."""

    def ranges(found: re.Match[str]) -> str:
        part = re.sub(r"\\p\{(\w)\}|\\(s)", lambda name: classes[name[1] or name[2]], found[0])
        if part == r"\S":
            return f"[^{classes['s']}]"
        return part if part.startswith("[") else f"[{part}]"

    return re.compile(re.sub(r"\[[^\]]*\]|\\p\{\w\}|\\[sS]", ranges, pattern)).findall


def _classes() -> dict[str, str]:
    """Letters, numbers and white space up to U+FFFF, as ranges, as the library classifies them."""
    beyond_ascii = "".join(map(chr, (*range(0x80, 0xD800), *range(0xE000, 0x10000))))
    runs = [run for run, _ in Split(Regex(r"\p{L}+|\p{N}+|\s+"), "isolated").pre_tokenize_str(beyond_ascii)]
    firsts, classes = "".join(run[0] for run in runs), dict(ASCII)
    for name, pattern in (("L", r"\p{L}"), ("N", r"\p{N}"), ("s", r"\s")):
        matches = Split(Regex(f"[^{pattern}]+"), "removed").pre_tokenize_str(firsts)
        kept = {char for match, _ in matches for char in match}
        classes[name] += "".join(f"{run[0]}-{run[-1]}" for run in runs if run[0] in kept)
    return classes
