"""The suite for tokenizers: a sound third-party tokenizer passes it, and it catches what their authors get wrong."""

from collections.abc import Callable
from pathlib import Path
from unittest import SkipTest

import pytest
from mplug_testing import Fault, TokenizerSuite

GLYPH = Path(__file__).parent / "third_party" / "nova-glyph"


class Glyph(TokenizerSuite):
    plugin = "glyph"
    settings = {"path": str(GLYPH / "tests" / "words.txt")}
    num_tokens = 265
    longest_match = True


class WithoutNumbers(Glyph):
    """Of an author who states nothing about the vocabulary."""

    num_tokens = None


@pytest.mark.wide("suites")
def test_a_sound_tokenizer_passes(own_tests: Callable[..., str]) -> None:
    assert "failed" not in own_tests("nova-glyph")


IMPORTS = "import re\n"
ENCODED = "tokens += piece.encode() if number is None else (number,)"
BATCH = "return [self.encode(text) for text in texts]"
DECODED = 'decode(errors="replace")'

FAULTS = {
    "building it imports torch": (
        IMPORTS,
        "import re\n\nimport torch\n",
        lambda: Glyph().test_neither_importing_nor_configuring_it_imports_torch(),
        "building 'glyph' imports torch; a tokenizer needs none",
    ),
    "its file is not kept beside the data": (
        'files = ("path",)',
        "files = ()",
        lambda: Glyph().test_its_config_survives_being_saved_and_read_again(),
        "words.txt', so no copy of the file is kept with the data",
    ),
    "unknown options pass": (
        'extra="forbid"',
        'extra="ignore"',
        lambda: Glyph().test_it_keeps_the_contract(),
        "does not forbid unknown fields",
    ),
    "the end of a document is beyond the vocabulary": (
        "self.eod = END",
        "self.eod = self.vocab_size",
        lambda: Glyph().test_the_end_of_a_document_is_a_token_that_no_text_has(),
        "vocab_size must include the eod",
    ),
    "the last word is beyond the vocabulary": (
        "self.vocab_size = END + 1 + len(self.words)",
        "self.vocab_size = END + len(self.words) - 1",
        lambda: Glyph().test_tokens_are_below_its_vocabulary(),
        "gives token 263; vocab_size is 263",
    ),
    "the last word is beyond the vocabulary, and no usual text has it": (
        "self.vocab_size = END + 1 + len(self.words)",
        "self.vocab_size = END + len(self.words)",
        lambda: WithoutNumbers().test_its_vocabulary_has_every_token_and_no_more(),
        "encoding 'and then', which its vocabulary has, gives token 264; vocab_size is 264 and must count every token",
    ),
    "the vocabulary is larger than the file's": (
        "self.vocab_size = END + 1 + len(self.words)",
        "self.vocab_size = END + 2 + len(self.words)",
        lambda: Glyph().test_its_vocabulary_has_every_token_and_no_more(),
        "its vocab_size is 266, and the suite's files declare 265 tokens",
    ),
    "a number of the vocabulary does not decode": (
        "self.vocab_size = END + 1 + len(self.words)",
        "self.vocab_size = END + 2 + len(self.words)",
        lambda: WithoutNumbers().test_its_vocabulary_has_every_token_and_no_more(),
        "decoding token 265, which is below its vocab_size of 266,: it raises IndexError",
    ),
    "an error does not name the file": (
        "path '{self.config.path}' is no list of words: {error}; name a text file",
        "this is no list of words; name a text file",
        lambda: Glyph().test_errors_name_the_file(),
        "that does not exist does not name it: this is no list of words",
    ),
    "only the error of a missing file names it": (
        "except (OSError, ValueError) as error",
        "except OSError as error",
        lambda: Glyph().test_errors_name_the_file(),
        "that is no text raises UnicodeDecodeError",
    ),
    "broken bytes are dropped": (
        DECODED,
        'decode(errors="ignore")',
        lambda: Glyph().test_parts_of_a_character_are_kept(),
        "decode to an empty text; bytes that are not UTF-8 must become U+FFFD",
    ),
    "the shortest word that matches is a token": (
        "sorted(self.words, key=len, reverse=True)",
        "sorted(self.words, key=len)",
        lambda: Glyph().test_tokens_are_the_longest_matches(),
        "has the token 'and' at character 7, and the vocabulary has 'and then', which is longer",
    ),
    "tokens are text": (
        "return tokens\n",
        "return [str(token) for token in tokens]\n",
        lambda: Glyph().test_tokens_are_below_its_vocabulary(),
        "tokens must be integers",
    ),
    "what is not ASCII is dropped": (
        ENCODED,
        'tokens += piece.encode("ascii", "ignore") if number is None else (number,)',
        lambda: Glyph().test_text_comes_back(),
        "decoding the tokens of 'Grüße, 世界 🌍",
    ),
    "line ends are dropped": (
        '"(?s:.)"',
        '"."',
        lambda: Glyph().test_text_comes_back(),
        "decoding the tokens of 'plain text: 1 + 2 = 3\\n\\tdone.'",
    ),
    "a text begins with a token of its own": (
        "tokens: list[int] = []",
        "tokens: list[int] = [END]",
        lambda: Glyph().test_text_comes_back(),
        "encoding the empty text gives tokens",
    ),
    "a text that spells the end of a document ends it": (
        ENCODED,
        f"{ENCODED}\n        tokens += [END] if '</s>' in text else []",
        lambda: Glyph().test_the_end_of_a_document_is_a_token_that_no_text_has(),
        "gives the eod 256",
    ),
    "the end of a document is text": (
        'if token == END:\n            return b""',
        'if token == END:\n            return b"</s>"',
        lambda: Glyph().test_the_end_of_a_document_is_a_token_that_no_text_has(),
        "decoding the eod gives text: 'one</s>' with it, 'one' without it",
    ),
    "a batch drops empty texts": (
        BATCH,
        "return [self.encode(text) for text in texts if text]",
        lambda: Glyph().test_a_batch_is_its_texts_one_by_one(),
        "encode_batch of 218 texts returns the tokens of 2",
    ),
    "a batch is sorted by length": (
        BATCH,
        "return [self.encode(text) for text in sorted(texts, key=len)]",
        lambda: Glyph().test_a_batch_is_its_texts_one_by_one(),
        "in a batch and",
    ),
    "a batch is padded": (
        BATCH,
        "found = [self.encode(text) for text in texts]\n"
        "        return [tokens + [0] * (max(map(len, found)) - len(tokens)) for tokens in found]",
        lambda: Glyph().test_a_batch_is_its_texts_one_by_one(),
        "in a batch and",
    ),
    "half a character does not decode": (
        DECODED,
        "decode()",
        lambda: Glyph().test_any_tokens_decode(),
        "it raises UnicodeDecodeError",
    ),
    "half a character becomes a surrogate": (
        DECODED,
        'decode(errors="surrogateescape")',
        lambda: Glyph().test_any_tokens_decode(),
        "it raises UnicodeEncodeError",
    ),
    "a thread is left": (
        BATCH,
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()\n        " + BATCH,
        lambda: Glyph().test_encoding_leaves_nothing_behind(),
        "encode_batch leaves a thread running",
    ),
    "the hook is misspelt": (
        "build_tokenizer(self)",
        "build_tokens(self)",
        lambda: Glyph().test_it_keeps_the_contract(),
        "'build_tokens' is not a hook; did you mean 'build_tokenizer'?",
    ),
}


def test_without_a_reference_the_suite_says_that_it_needs_one(plant: Callable[..., None]) -> None:
    plant("nova-glyph")
    with pytest.raises(SkipTest, match=r"^needs a reference: override `reference` with the tokens of a text"):
        Glyph().test_its_tokens_are_those_of_its_reference()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_suite_catches_a_tokenizer_of_which(fault: str, plant: Callable[..., None]) -> None:
    old, new, check, words = FAULTS[fault]
    plant("nova-glyph", old, new)
    with pytest.raises(Fault) as caught:
        check()
    assert words in str(caught.value)
