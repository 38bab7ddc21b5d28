"""The suite for tokenizers.

    from mplug_testing import TokenizerSuite

    class TestGlyph(TokenizerSuite):
        plugin = "glyph"
        settings = {"path": str(Path(__file__).with_name("alphabet.txt"))}

`settings` are the options of the plugin's `Config`, without a section's name: a run's config has no section for a
tokenizer.
"""

import pickle
import random
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from mplug.errors import UsageError
from mplug_testing.suite import naming_failures, require, smoke
from mplug_testing.vocabulary import VocabularyChecks

if TYPE_CHECKING:
    from mplug_tokenization.contract import CorpusTokenizer

TEXTS = (
    "",
    "a",
    "plain text: 1 + 2 = 3\n\tdone.",
    "  two spaces, and  two more  ",
    "Grüße, 世界 🌍 — ﬁ ½ e\u0301",
    "<|endoftext|></s><eos>[UNK]",
    "\r\n\x00\x7f",
    "".join(map(chr, range(32, 127))),
    "long " * 3000,
)
"""Texts that a lossless tokenizer restores: empty, spaces, characters of 1 to 4 bytes, names of special tokens."""
LOOK = 2000
"""Number of sequences of random tokens that the suite decodes."""


class TokenizerSuite(VocabularyChecks):
    """The requirements for a tokenizer: decoding restores text, `eod` occurs in no text, a batch equals its texts.

    Override `reference` with the tokens of a text by a plain implementation. `num_tokens` and `longest_match` are in
    `vocabulary.py`.
    """

    kind = "tokenizers"
    lossless: ClassVar[bool] = True
    """Decoding restores every text exactly. If False, decoding must restore a text that has been decoded once."""

    @classmethod
    def build(cls) -> "CorpusTokenizer":
        """The tokenizer with the suite's settings."""
        from mplug_tokenization import describe_tokenizer, load_tokenizer

        with naming_failures("building it"):
            return load_tokenizer(describe_tokenizer(cls.plugin, cls.settings))

    # These tests replace those of the base class, because a tokenizer is no section of a run's config.

    @smoke
    def test_neither_importing_nor_configuring_it_imports_torch(self) -> None:
        """Nor does building it: corpora are tokenized on machines without torch."""
        code = (
            f"import sys\nsys.path[:] = {sys.path!r}\nfrom mplug_tokenization import describe_tokenizer\n"
            f"describe_tokenizer({self.plugin!r}, {dict(self.settings)!r})\n"
            f"sys.exit(77 if 'torch' in sys.modules else 0)"
        )
        finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        require(finished.returncode != 77, f"building '{self.plugin}' imports torch; a tokenizer needs none")
        require(finished.returncode == 0, f"building '{self.plugin}' fails:\n{finished.stderr}")

    @smoke
    def test_its_config_survives_being_saved_and_read_again(self) -> None:
        """The record beside the data makes the same tokenizer, also after the original files are gone."""
        from mplug_tokenization import describe_tokenizer, keep_tokenizer, load_tokenizer, read_tokenizer

        with TemporaryDirectory(prefix="mplug-tokenizer-") as folder:
            kept = keep_tokenizer(describe_tokenizer(self.plugin, self.settings), Path(folder) / "corpus")
            again = read_tokenizer(Path(folder) / "corpus")
            require(again == kept, f"its record changes when it is saved and read again: {kept!r} -> {again!r}")
            outside = [str(value) for value in kept.options.values() if _is_a_file(value)]
            require(
                not outside,
                f"its 'files' does not name the option with the file '{outside and outside[0]}', so no copy of the "
                f"file is kept with the data",
            )
            first, second = self.build(), load_tokenizer(kept)
            for text in TEXTS:
                require(
                    list(first.encode(text)) == list(second.encode(text)),
                    f"built from its saved record, it encodes {text!r} differently",
                )

    @smoke
    def test_an_unknown_field_is_an_error_that_names_it(self) -> None:
        """A misspelt field must never be ignored."""
        from mplug_tokenization import describe_tokenizer

        try:
            describe_tokenizer(self.plugin, {**self.settings, "no_such_field": 1})
        except UsageError as error:
            named = "no_such_field" in str(error)
            require(named, f"the error of an unknown field does not name 'no_such_field': {error}")
        else:
            require(False, "its Config accepts the unknown field 'no_such_field'; forbid extra fields")

    # Tokens.

    @smoke
    def test_tokens_are_below_its_vocabulary(self) -> None:
        """`vocab_size` is the size of a model's embedding, and counts the end of a document."""
        tokenizer = self.build()
        require(tokenizer.vocab_size > 1, f"its vocab_size is {tokenizer.vocab_size}; it must be at least 2")
        for text in TEXTS:
            tokens = list(tokenizer.encode(text))
            kinds = {type(token) for token in tokens} - {int}
            require(not kinds, f"encoding {text[:50]!r} gives tokens of {kinds}; tokens must be integers")
            outside = [token for token in tokens if not 0 <= token < tokenizer.vocab_size]
            size = tokenizer.vocab_size
            require(not outside, f"encoding {text[:50]!r} gives token {outside and outside[0]}; vocab_size is {size}")

    @smoke
    def test_text_comes_back(self) -> None:
        """Exactly if it is lossless. Otherwise decoding must restore a text that has been decoded once."""
        tokenizer = self.build()
        for text in TEXTS:
            with naming_failures(f"encoding and decoding {text[:50]!r}"):
                again = tokenizer.decode(tokenizer.encode(text))
            if not self.lossless:
                text, again = again, tokenizer.decode(tokenizer.encode(again))
            require(again == text, f"decoding the tokens of {text[:50]!r} gives {again[:50]!r}")
        require(
            self.build().encode("") == [],
            "encoding the empty text gives tokens; do not add special tokens, which the data plugin writes",
        )

    @smoke
    def test_the_end_of_a_document_is_a_token_that_no_text_has(self) -> None:
        """Neither plain text nor text that spells the token's name has it. It decodes to an empty text."""
        tokenizer = self.build()
        eod = tokenizer.eod
        if eod is None:
            return
        require(isinstance(eod, int), f"its eod is a {type(eod).__name__}; it must be the number of a token")
        size = tokenizer.vocab_size
        require(0 <= eod < size, f"its eod is {eod}, and its vocab_size {size}; vocab_size must include the eod")
        for text in TEXTS:
            require(eod not in tokenizer.encode(text), f"encoding {text[:50]!r} gives the eod {eod}; no text may")
            (batched,) = tokenizer.encode_batch([text])
            require(eod not in list(batched), f"encode_batch of {text[:50]!r} gives the eod {eod}; no text may")
        tokens = tokenizer.encode("one")
        with naming_failures("decoding its eod"):
            ended, plain = tokenizer.decode([*tokens, eod]), tokenizer.decode(tokens)
        require(ended == plain, f"decoding the eod gives text: {ended!r} with it, {plain!r} without it")

    @smoke
    def test_a_batch_is_its_texts_one_by_one(self) -> None:
        """In order, independent of the rest of the batch.

        An empty text has no tokens, and an empty batch has no texts.
        """
        tokenizer = self.build()
        require(len(tokenizer.encode_batch([])) == 0, "encode_batch of no texts returns some; it must return none")
        generator = random.Random(0)
        texts = [*TEXTS, *TEXTS[::-1]]
        texts += ["".join(generator.choices("ab \nüß世🌍.", k=generator.randrange(40))) for _ in range(200)]
        with naming_failures("encode_batch"):
            found = [list(map(int, tokens)) for tokens in tokenizer.encode_batch(texts)]
        require(len(found) == len(texts), f"encode_batch of {len(texts)} texts returns the tokens of {len(found)}")
        for text, tokens in zip(texts, found, strict=True):
            alone = tokenizer.encode(text)
            same = tokens == list(alone)
            require(same, f"{text[:50]!r} has tokens {tokens[:9]} in a batch and {alone[:9]} alone")

    @smoke
    def test_any_tokens_decode(self) -> None:
        """Including part of a character, which samples and windows of the data may have.

        Bytes that are not UTF-8 become U+FFFD.
        """
        tokenizer, generator = self.build(), random.Random(0)
        everything = tokenizer.encode("".join(TEXTS[:-1]))
        for _ in range(LOOK):
            tokens = [generator.randrange(tokenizer.vocab_size) for _ in range(generator.randrange(1, 9))]
            begin = generator.randrange(len(everything))
            for some in (tokens, everything[begin : begin + 5]):
                with naming_failures(f"decoding {some}"):
                    text = tokenizer.decode(some)
                    text.encode()
        with naming_failures("decoding a tuple"):
            tokenizer.decode(tuple(everything))

    @smoke
    def test_encoding_leaves_nothing_behind(self) -> None:
        """A text's tokens do not depend on earlier calls, and no thread remains."""
        tokenizer, threads = self.build(), threading.active_count()
        before = [list(tokenizer.encode(text)) for text in TEXTS]
        tokenizer.encode_batch(TEXTS * 20)
        for text, tokens in zip(TEXTS, before, strict=True):
            require(
                list(tokenizer.encode(text)) == tokens, f"{text[:50]!r} has other tokens after other texts were encoded"
            )
        require(threading.active_count() <= threads, "encode_batch leaves a thread running")

    @smoke
    def test_its_record_can_go_to_another_process(self) -> None:
        """Processes that encode a corpus receive the pickled record and build the tokenizer from it."""
        from mplug_tokenization import describe_tokenizer, load_tokenizer

        record = describe_tokenizer(self.plugin, self.settings)
        again = pickle.loads(pickle.dumps(record))
        require(again == record, "its record changes when it is pickled; its Config must hold plain data")
        first, second = load_tokenizer(again), self.build()
        same = all(list(first.encode(text)) == list(second.encode(text)) for text in TEXTS)
        require(same, "two tokenizers built from one record encode differently")


def _is_a_file(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) < 1000 and "\0" not in value and Path(value).is_file()
