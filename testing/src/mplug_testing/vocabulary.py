"""Tests of the tokenizer suite that look at a tokenizer's vocabulary and at its files."""

import base64
import binascii
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import SkipTest

from mplug.errors import UsageError
from mplug.registry.entry_points import BrokenPlugin
from mplug_testing.harness import installed_plugins
from mplug_testing.suite import Fault, PluginSuite, naming_failures, require

if TYPE_CHECKING:
    from mplug_tokenization.contract import CorpusTokenizer

MISSING = "no-such-folder/vocabulary"
BEYOND = 16
"""Number of tokens from `vocab_size` on that the suite looks for."""
FROM_FILES = 20_000
"""Maximum number of texts that the suite takes from a tokenizer's files."""
BROKEN = "\N{REPLACEMENT CHARACTER}"
CHARACTERS = "ü世🌍é½—"
"""Characters of two to four bytes."""


class VocabularyChecks(PluginSuite):
    """Every token is below `vocab_size`; broken bytes are kept; matches are the claimed ones; errors name files."""

    uses_torch = False
    num_tokens: ClassVar[int | None] = None
    """The size of the vocabulary that the suite's files declare, with the end of a document, counted by hand."""
    longest_match: ClassVar[bool] = False
    """At every position of a text, the token is the longest one of the vocabulary that matches there."""

    @classmethod
    def build(cls) -> "CorpusTokenizer":
        """The tokenizer with the suite's settings."""
        raise NotImplementedError

    def reference(self, text: str) -> list[int]:
        """The tokens of a text, by a plain implementation or an independent library."""
        raise NotImplementedError(f"{type(self).__name__} defines no `reference`: the tokens of a text")

    def test_its_vocabulary_has_every_token_and_no_more(self) -> None:
        """No text has a token that is not below `vocab_size`, and every number below it decodes."""
        tokenizer = self.build()
        size = tokenizer.vocab_size
        require(
            self.num_tokens in (None, size),
            f"its vocab_size is {size}, and the suite's files declare {self.num_tokens} tokens (`num_tokens`)",
        )
        for token in range(size):
            with naming_failures(f"decoding token {token}, which is below its vocab_size of {size},"):
                tokenizer.decode([token])
        for text in (*self._texts_beyond(tokenizer), *self._texts_of_files()):
            outside = [token for token in tokenizer.encode(text) if not 0 <= token < size]
            require(
                not outside,
                f"encoding {text[:50]!r}, which its vocabulary has, gives token {outside and outside[0]}; vocab_size "
                f"is {size} and must count every token",
            )

    def _texts_beyond(self, tokenizer: "CorpusTokenizer") -> Iterator[str]:
        """The texts of numbers from `vocab_size` on, if the tokenizer has any."""
        for token in range(tokenizer.vocab_size, tokenizer.vocab_size + BEYOND):
            try:
                text = tokenizer.decode([token])
            except Exception:  # the right answer: there is no such token
                continue
            yield text

    def _files(self) -> dict[str, Path]:
        """The files that the suite's settings name, by option."""
        names = getattr(installed_plugins().load(self.entry()), "files", ())
        return {name: Path(str(self.settings[name])) for name in names if self.settings.get(name) is not None}

    def _texts_of_files(self) -> Iterator[str]:
        """The lines of the tokenizer's files and their words; in JSON its texts; in base64 what it stands for."""
        for path in self._files().values():
            try:
                content = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):  # no text: the format's own library knows the vocabulary
                continue
            yield from islice(dict.fromkeys(_texts_in(content)), FROM_FILES)

    def test_parts_of_a_character_are_kept(self) -> None:
        """If a character has several tokens, no part of them decodes to nothing: broken bytes become U+FFFD."""
        tokenizer, found = self.build(), False
        for character in CHARACTERS:
            tokens = list(tokenizer.encode(character))
            if tokenizer.decode(tokens) != character:  # a tokenizer that does not know the character
                continue
            for cut in range(1, len(tokens)):
                found = True
                first, rest = tokenizer.decode(tokens[:cut]), tokenizer.decode(tokens[cut:])
                require(
                    first != "" or rest == character,
                    f"{character!r} has the tokens {tokens}, and {tokens[:cut]} decode to an empty text; bytes that "
                    f"are not UTF-8 must become U+FFFD (errors='replace')",
                )
                require(
                    BROKEN in first + rest or first + rest == character,
                    f"{character!r} has the tokens {tokens}, and the parts {tokens[:cut]} and {tokens[cut:]} decode to "
                    f"{first!r} and {rest!r}; bytes that are not UTF-8 must become U+FFFD",
                )
        if not found:
            raise SkipTest("every character has one token, or none comes back: no token is a part of a character")

    def test_its_tokens_are_those_of_its_reference(self) -> None:
        """For plain and for random texts, and for the texts of its files."""
        if type(self).reference is VocabularyChecks.reference:
            raise SkipTest(
                "needs a reference: override `reference` with the tokens of a text; without it the suite cannot see "
                "whether the tokenizer chooses the right ones"
            )
        tokenizer = self.build()
        for text in self._samples(tokenizer):
            with naming_failures(f"the suite's reference of {text[:50]!r}"):
                expected = list(self.reference(text))
            found = list(map(int, tokenizer.encode(text)))
            require(found == expected, f"{text[:50]!r} has the tokens {found[:9]}, and by the reference {expected[:9]}")

    def test_tokens_are_the_longest_matches(self) -> None:
        """If the suite sets `longest_match`: no longer token of the vocabulary matches where a shorter one is."""
        if not self.longest_match:
            raise SkipTest("the suite sets longest_match = False")
        tokenizer = self.build()
        texts = {token: tokenizer.decode([token]) for token in range(tokenizer.vocab_size) if token != tokenizer.eod}
        words = {text for text in texts.values() if text and BROKEN not in text}
        longest = max(map(len, words), default=0)
        for text in self._samples(tokenizer):
            at = 0
            for token in map(int, tokenizer.encode(text)):
                piece = texts.get(token, "")
                if not piece or BROKEN in piece:  # a part of a character: the place in the text is lost
                    break
                better = next((n for n in range(longest, len(piece), -1) if text[at : at + n] in words), None)
                if better is not None and at + better <= len(text):
                    raise Fault(
                        f"{text[:50]!r} has the token {piece!r} at character {at}, and the vocabulary has "
                        f"{text[at : at + better]!r}, which is longer; the suite sets longest_match = True"
                    )
                at += len(piece)

    def _samples(self, tokenizer: "CorpusTokenizer") -> Iterator[str]:
        """Texts of the vocabulary, alone and in random order, and random characters."""
        generator = random.Random(0)
        words = list(islice(dict.fromkeys(self._texts_of_files()), 500))
        words += [tokenizer.decode([generator.randrange(tokenizer.vocab_size)]) for _ in range(200)]
        words = [word for word in words if word and BROKEN not in word]
        yield from words
        for _ in range(100):
            yield "".join(generator.choices([*words, " ", "a", "ü"], k=generator.randrange(1, 9)))
            yield "".join(generator.choices("ab \nüß世🌍.", k=generator.randrange(40)))

    # Files.

    def test_errors_name_the_file(self) -> None:
        """A file that is missing, empty, cut in half or no text is read, or refused by a UsageError with its path."""
        files = self._files()
        if not files:
            raise SkipTest(
                f"the settings of the suite name no file of '{self.plugin}' (its class lists them in `files`)"
            )
        for option, path in files.items():
            self._require_named(option, MISSING, "does not exist", may_be_read=False)
            with TemporaryDirectory(prefix="mplug-tokenizer-") as folder:
                content = path.read_bytes()
                for what, broken in _broken(content).items():
                    changed = Path(folder) / f"{what.replace(' ', '-')}{path.suffix}"
                    changed.write_bytes(broken)
                    self._require_named(option, str(changed), f"is {what}", may_be_read=True)

    def _require_named(self, option: str, path: str, what: str, may_be_read: bool) -> None:
        plugin: Any = installed_plugins().load(self.entry())
        where = f"a file '{path}' of the option '{option}' that {what}"
        try:
            plugin(plugin.Config(**{**self.settings, option: path})).build_tokenizer()
        except BrokenPlugin:
            raise
        except UsageError as error:
            require(path in str(error), f"the error about {where} does not name it: {error}; a user has several files")
        except Exception as error:
            raise Fault(
                f"{where} raises {type(error).__name__}: {error}; raise a UsageError that names the file"
            ) from error
        else:
            require(may_be_read, f"{where} is accepted; raise a UsageError that names it")

    # Fields of its Config.

    @classmethod
    def with_fields(cls, fields: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
        """The options of the tokenizer; no section's name comes before them."""
        return {**cls.settings, **beside, **fields}

    @classmethod
    def accept(cls, settings: Mapping[str, Any]) -> None:
        """UsageError if the Config refuses the options."""
        cls.config_of(settings)

    @classmethod
    def config_of(cls, settings: Mapping[str, Any]) -> Any:
        """The Config object of options."""
        from pydantic import ValidationError

        try:
            return installed_plugins().load(cls.entry()).Config(**settings)
        except ValidationError as error:
            raise UsageError(str(error)) from None

    @classmethod
    def values_for(cls, field: str) -> Sequence[Any] | None:
        """A file that does not exist, for options that are files: the tokenizer refuses it."""
        is_file = field in getattr(installed_plugins().load(cls.entry()), "files", ())
        return super().values_for(field) or ([MISSING] if is_file else None)

    @classmethod
    def evidence(cls, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The numbers that a tokenizer states, and the tokens and decoded texts of plain texts."""
        plugin: Any = installed_plugins().load(cls.entry())
        tokenizer = plugin(plugin.Config(**settings)).build_tokenizer()
        special = dict(getattr(tokenizer, "special_tokens", {}))
        yield "numbers", (tokenizer.vocab_size, tokenizer.eod, special)
        texts = ("the quick brown fox, in the end", "Grüße, 世界 🌍", "  two  spaces\n\t1234567", "can't <|endoftext|>")
        yield "tokens", [list(map(int, tokenizer.encode(text))) for text in texts]
        yield "texts", [tokenizer.decode([token]) for token in range(min(tokenizer.vocab_size, 1000))]


def _texts_in(content: str) -> Iterator[str]:
    try:
        yield from _strings(json.loads(content))
        return
    except (ValueError, RecursionError):  # no JSON
        pass
    for line in content.splitlines():
        yield line
        for word in line.split():
            yield word
            try:
                yield base64.b64decode(word, validate=True).decode()
            except (binascii.Error, ValueError):  # no base64, or no text
                continue


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield name
            yield from _strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)


def _broken(content: bytes) -> dict[str, bytes]:
    """Contents that a user's damaged file may have."""
    noise = random.Random(0).randbytes(200)
    return {"empty": b"", "cut in half": content[: len(content) // 2], "no text": b"\xff\xfe\x00" + noise}
