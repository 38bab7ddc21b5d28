"""Packing and vocabularies, by themselves."""

from collections.abc import Iterable, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mplug_tokenization.packing import best_fit_decreasing
from mplug_tokenization.vocabulary import Vocabulary

# Packing.


@settings(max_examples=200)
@given(st.lists(st.integers(1, 30), max_size=60), st.integers(30, 50), st.integers(1, 6))
def test_every_item_is_in_one_bin_and_no_bin_is_too_full(lengths: list[int], capacity: int, most: int) -> None:
    bins = best_fit_decreasing(lengths, capacity, most)
    assert sorted(item for one in bins for item in one) == list(range(len(lengths)))
    assert all(0 < len(one) <= most and sum(lengths[item] for item in one) <= capacity for one in bins)


def fewest_bins(lengths: list[int], capacity: int) -> int:
    """By trying: every item in every bin."""
    for count in range(len(lengths) + 1):
        for where in product(range(count), repeat=len(lengths)):
            if all(
                sum(n for n, at in zip(lengths, where, strict=True) if at == one) <= capacity for one in range(count)
            ):
                return count
    raise AssertionError


@settings(max_examples=60)
@given(st.lists(st.integers(1, 10), max_size=6))
def test_packing_needs_few_more_bins_than_the_best_packing(lengths: list[int]) -> None:
    assert len(best_fit_decreasing(lengths, 10, 99)) <= 11 / 9 * fewest_bins(lengths, 10) + 1


def test_an_item_is_put_into_the_bin_with_the_least_room_left() -> None:
    assert best_fit_decreasing([5, 3, 6, 2, 4], 10, 9) == [[2, 4], [0, 1, 3]]
    assert best_fit_decreasing([1, 1, 1, 1], 10, 3) == [[0, 1, 2], [3]]
    assert best_fit_decreasing([], 10, 3) == []


# Vocabularies.


class Bytes:
    """A token is a byte."""

    vocab_size = 256
    eod: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(tokens).decode()


class Pairs(Bytes):
    """A tokenizer that merges: two letters are a token where they are alike, as 'oo' is."""

    vocab_size = 512

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        for letter in text.encode():
            if tokens and tokens[-1] == letter:
                tokens[-1] = 256 + letter
            else:
                tokens.append(letter)
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(chr(token) if token < 256 else 2 * chr(token - 256) for token in tokens)


def marked(vocabulary: Vocabulary, text: str, *answers: tuple[int, int]) -> list[str]:
    """What of a text is an answer, token by token."""
    encoded = vocabulary.encode_answers(text, answers)
    assert vocabulary.decode(encoded.tokens) == text
    return [vocabulary.decode([t]) for t, answer in zip(encoded.tokens, encoded.answers, strict=True) if answer]


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("ab:cd<e>\n", "cd<e>", ["c", "d", "<e>"]),
        ("ab::d<e>\n", ":d<e>", ["::", "d", "<e>"]),  # a token over the beginning is the answer's
        ("ab:cd\n\n", "cd\n", ["c", "d", "\n\n"]),  # and one over the end
        ("ab:coo", "coo", ["c", "oo"]),
        ("<e><e>oo", "<e>o", ["<e>", "oo"]),
        ("ab", "", []),
        ("<e>", "<e>", ["<e>"]),
    ],
)
def test_an_answer_is_found_among_tokens_that_merge(text: str, answer: str, expected: list[str]) -> None:
    vocabulary = Vocabulary(Pairs(), ["<e>"])
    begin = text.rindex(answer) if answer != "<e>o" else 3
    assert marked(vocabulary, text, (begin, begin + len(answer))) == expected


def test_several_answers_are_found_in_one_text() -> None:
    vocabulary = Vocabulary(Pairs(), ["<e>", "<e>>"])
    text = "a:b<e>c:dd<e>>e"
    assert marked(vocabulary, text, (2, 6), (8, 14)) == ["b", "<e>", "dd", "<e>>"]


def test_characters_of_several_bytes_are_not_cut() -> None:
    encoded = Vocabulary(Bytes(), []).encode_answers("aé:ß€", [(3, 5)])
    assert [t for t, answer in zip(encoded.tokens, encoded.answers, strict=True) if answer] == list("ß€".encode())


class Knowing(Bytes):
    special_tokens = {"<b>": 7}


@pytest.mark.parametrize(
    ("tokenizer", "tokens", "size"), [(Bytes(), [ord("x"), 257, 256], 258), (Knowing(), [ord("x"), 7, 256], 257)]
)
def test_special_tokens_are_numbered_after_the_tokenizers_unless_it_knows_them(
    tokenizer: Bytes, tokens: list[int], size: int
) -> None:
    vocabulary = Vocabulary(tokenizer, ["<a>", "<b>", "<a>"])
    assert (vocabulary.encode("x<b><a>"), vocabulary.vocab_size) == (tokens, size)
