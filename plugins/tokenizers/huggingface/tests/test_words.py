"""Word by word, texts have the library's tokens; where that is not known, the library itself is asked."""

import json
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from byte_level import BYTE_LEVEL, byte_level
from mplug_huggingface import FileTokenizer, HuggingFace, words
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from mplug import UsageError

LEARNT = [
    "the quick brown fox jumps over the lazy dog's back; it's 1234 or 56,789",
    "def f(x):\n    return x\n\n\n    if x:  # I'LL\r\n\t\tpass",
    "Grüße, 世界 — ﬁ ½ e\u0301\u2028 «ça»  Ελληνικά русский язык हिन्दी 한국어 ٣٤٥",
] * 3
ALPHABET = [
    *"aZé世ñ1²٣ \t\n\r\x0b\x1c\x1f\x85\xa0\u2028\u3000'’.,;-_\u0301\u200d\x00sStTdDmMſK",
    "'s",
    "'LL",
    "  ",
    "\r\n",
]
BMP = [chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000]


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    """As in the files of Llama 3 and Qwen 2."""
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), spelling])


CUTS = {
    "byte level": BYTE_LEVEL,
    "sequence of one": pre_tokenizers.Sequence([BYTE_LEVEL]),
    "gpt2": split(words.GPT2),
    "qwen2": split(words.QWEN2),
    "llama3": split(words.LLAMA3),
}


def trained(cut: pre_tokenizers.PreTokenizer) -> Tokenizer:
    return byte_level(LEARNT, "<|endoftext|>", size=700, cut=cut)


Change = Callable[[dict[str, Any]], object]
Encode = Callable[[Sequence[str]], list[list[int]]]


def both(tokenizer: Tokenizer, folder: Path, change: Change = lambda _: None) -> tuple[FileTokenizer, Encode]:
    """Ours of the tokenizer's file after a change, and what the library itself makes of texts by that file."""
    fields = json.loads(tokenizer.to_str())
    change(fields)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(fields))
    library = Tokenizer.from_file(str(path))
    library.encode_special_tokens = True
    ours = HuggingFace(HuggingFace.Config(path=str(path))).build_tokenizer()
    return ours, lambda texts: [library.encode(text, add_special_tokens=False).ids for text in texts]


def tokens(tokenizer: FileTokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [list(map(int, found)) for found in tokenizer.encode_batch(texts)]


MORE = [pytest.param(name, marks=pytest.mark.wide("fuzz")) for name in ("byte level", "llama3")]


@pytest.mark.parametrize("name", ["qwen2", *MORE])
def test_every_character_has_the_librarys_tokens_next_to_every_kind_of_character(name: str, tmp_path: Path) -> None:
    ours, library = both(trained(CUTS[name]), tmp_path)
    neighbours = ("a{}b", " {}", "1{}1", "'{}", "{0}{0}", "\n{}\n", ".{} .")
    step = len(neighbours) if name == "qwen2" else 1  # the quick test: every character beside one of them
    texts = ["".join(map(around.format, BMP[number % step :: step])) for number, around in enumerate(neighbours)]
    for text in (*texts, *(text.encode("ascii", "ignore").decode() for text in texts)):
        assert ours.words is not None
        assert ours.words._cut_for(text) is not None
        assert tokens(ours, [text]) == library([text])


@pytest.mark.wide("fuzz", quick=["llama3"])
@pytest.mark.parametrize("name", CUTS)
def test_random_texts_have_the_librarys_tokens(name: str, tmp_path: Path) -> None:
    ours, library = both(trained(CUTS[name]), tmp_path)
    generator = random.Random(0)
    ascii_only = [piece for piece in ALPHABET if piece.isascii()]
    for alphabet in (ascii_only, ALPHABET, [*ALPHABET, "🌍", "𝒳"]):
        texts = ["".join(generator.choices(alphabet, k=generator.randrange(30))) for _ in range(4000)]
        assert tokens(ours, texts) == library(texts)
        assert [ours.encode(text) for text in texts[:50]] == library(texts[:50])
    assert tokens(ours, LEARNT) == library(LEARNT)


def test_an_added_token_that_is_not_special_is_made_from_its_text(tmp_path: Path) -> None:
    tokenizer = trained(BYTE_LEVEL)
    tokenizer.add_tokens([AddedToken("<tool (a)>", normalized=False), AddedToken("zz", lstrip=True)])
    ours, library = both(tokenizer, tmp_path)
    texts = ["fox <tool (a)> dog", "fox <tool> dog", "fizz  zz fox", "<|endoftext|> fox"]
    assert tokens(ours, texts) == library(texts)
    assert ours.words is not None
    assert [ours.words._cut_for(text) is None for text in texts] == [True, False, True, False]
    assert library(texts)[0].count(tokenizer.token_to_id("<tool (a)>")) == 1


def test_normalized_texts_have_the_librarys_tokens(tmp_path: Path) -> None:
    for form in (normalizers.NFC(), normalizers.NFKD()):
        tokenizer = trained(BYTE_LEVEL)
        tokenizer.normalizer = form
        ours, library = both(tokenizer, tmp_path)
        texts = ["e\u0301 é ﬁ", "plain", "".join(map(chr, range(128))), "\uff07s"]
        assert tokens(ours, texts) == library(texts)
        assert ours.words is not None


FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}


def two_tokens_of_one_number(fields: dict[str, Any]) -> None:
    fields["model"]["vocab"] |= {"<one>": 5000, "<two>": 5000}
    fields["added_tokens"] += [{"id": 5000, "content": name, **FLAGS} for name in ("<one>", "<two>")]


def template(*pieces: str) -> Change:
    """A template of a text's tokens: those of sequences A and B."""
    single = [{"Sequence": {"id": name, "type_id": 0}} for name in pieces]
    whole = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}
    return lambda fields: fields.update(post_processor=whole)


DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL])
TWICE = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words.LLAMA3), "isolated")] * 3)
OTHERS: dict[str, tuple[pre_tokenizers.PreTokenizer, Change]] = {
    "a space before the text": (pre_tokenizers.ByteLevel(add_prefix_space=True), lambda _: None),
    "digits one by one": (DIGITS, lambda _: None),
    "another pattern": (split(r"\p{L}+|\s|[^\p{L}]"), lambda _: None),
    "cut twice": (TWICE, lambda _: None),
    "no cut": (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), lambda _: None),
    "a normalizer that changes ASCII": (BYTE_LEVEL, lambda fields: fields.update(normalizer={"type": "Lowercase"})),
    "a template that doubles": (BYTE_LEVEL, template("A", "A")),
    "a template that omits the text": (BYTE_LEVEL, template("B")),
    "an added token beyond ASCII": (
        BYTE_LEVEL,
        lambda fields: fields["added_tokens"].append({"id": 700, "content": "ﬁ", **FLAGS}),
    ),
    "two added tokens of one number": (BYTE_LEVEL, two_tokens_of_one_number),
    "dropout": (BYTE_LEVEL, lambda fields: fields["model"].update(dropout=0.5)),
}


@pytest.mark.parametrize("which", OTHERS)
def test_the_library_encodes_with_tokenizers_of_other_forms(which: str, tmp_path: Path) -> None:
    cut, change = OTHERS[which]
    ours, library = both(trained(cut), tmp_path, change)
    assert ours.words is None
    texts = ["Fox 12 ﬁ it's", "the quick  brown", "", "fox <one> dog", "fox <two> dog"]
    if which not in ("dropout", "a template that omits the text"):
        assert tokens(ours, texts) == library(texts)


@pytest.mark.parametrize("name", ["s", "L"])
def test_the_library_encodes_if_it_cuts_words_in_another_way(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(words.ASCII, name, "a-y")
    ours, library = both(trained(BYTE_LEVEL), tmp_path)
    assert ours.words is None
    assert tokens(ours, LEARNT) == library(LEARNT)


def test_the_library_encodes_texts_beyond_ascii_if_its_letters_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "_classes", lambda: words.ASCII)
    ours, library = both(trained(BYTE_LEVEL), tmp_path)
    assert ours.words is not None
    assert [ours.words._cut_for(text) is None for text in ("plain", "Grüße")] == [False, True]
    assert tokens(ours, LEARNT) == library(LEARNT)


def test_a_word_that_left_the_cache_has_the_same_tokens_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "REMEMBERED", 20)
    ours, library = both(trained(BYTE_LEVEL), tmp_path)
    assert ours.words is not None
    generator, memory = random.Random(0), ours.words._memory
    for _ in range(200):
        text = " ".join("".join(generator.choices("ab1", k=3)) for _ in range(10))
        assert tokens(ours, [text]) == library([text])
    text = " ".join(map(str, range(1000)))  # words leave it within a text too
    assert tokens(ours, [text]) == library([text])
    assert memory._before
    assert max(len(memory), len(memory._before)) <= 20


def few_bytes(fields: dict[str, Any]) -> None:
    fields["model"]["vocab"] = {"f": 0, "o": 1, "x": 2}  # bytes that have no token are left out
    fields["model"]["merges"] = fields["added_tokens"] = []


@pytest.mark.parametrize(("change", "word"), [(lambda _: None, "xqzj" * 1000), (few_bytes, "q" * 1000 + "f")])
def test_long_words_are_not_cached_also_if_they_have_few_tokens(change: Change, word: str, tmp_path: Path) -> None:
    ours, library = both(trained(BYTE_LEVEL), tmp_path, change)
    assert tokens(ours, [word, "fox"]) == library([word, "fox"])
    assert ours.words is not None
    assert list(ours.words._memory) == ["fox"]


def test_a_pickled_copy_also_encodes_special_tokens_as_text(tmp_path: Path) -> None:
    ours, library = both(trained(BYTE_LEVEL), tmp_path)
    texts = ["fox <|endoftext|>", "<|endoftext|> 🌍"]
    assert tokens(pickle.loads(pickle.dumps(ours)), texts) == tokens(ours, texts) == library(texts)


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    ours, _ = both(trained(BYTE_LEVEL), tmp_path)
    with pytest.raises(UsageError, match="the tokenizer cannot encode a text: "):
        ours.encode("fox \ud800")
