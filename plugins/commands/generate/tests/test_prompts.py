"""Files of prompts, and texts that grow token by token: characters of several bytes, end tokens, stop words."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mplug_generate.prompts import Text, occurrences, output_line, read_prompts

from mplug.errors import UsageError

END = 256


class Bytes:
    """Every byte is a token."""

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token != END).decode(errors="replace")


def grown(prompt: str, following: bytes, *stops: str) -> tuple[Text, list[str]]:
    """The text after these bytes, and the parts that a terminal shows."""
    text = Text(Bytes(), list(prompt.encode()), {END}, stops)
    parts = []
    for token in following:
        ended = text.take(token)
        parts.append(text.shown())
        if ended:
            break
    text.finish()
    return text, [*parts, text.shown(is_last=True)]


@settings(max_examples=200)
@given(st.text(max_size=12), st.text(max_size=20), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_a_text_ends_before_the_first_stop_word_and_is_shown_once(prompt: str, new: str, stops: list[str]) -> None:
    text, parts = grown(prompt, new.encode(), *stops)
    found = [at for at in (new.find(stop) for stop in stops) if at >= 0]
    # The first stop word that is complete ends the text, even if a longer one began before it.
    complete = [end for end in range(len(new) + 1) if any(new[:end].endswith(stop) for stop in stops)]
    expected = new
    if complete:
        seen = new[: complete[0]]
        expected = seen[: min(at for at in (seen.find(stop) for stop in stops) if at >= 0)]
    assert text.text == expected
    assert text.ended == ("stop" if found else "length")
    assert "".join(parts) == expected


def test_the_beginning_of_a_stop_word_is_shown_only_when_it_is_none() -> None:
    assert grown("", b"a STO-STOP b", "STOP")[1] == ["a", " ", "", "", "", "STO-", "", "", "", "", ""]
    assert grown("", b"a STO", "STOP")[1] == ["a", " ", "", "", "", "STO"]


def test_a_character_is_shown_when_all_its_bytes_have_come() -> None:
    text, parts = grown("é", "aé€".encode())
    assert parts == ["a", "", "é", "", "", "€", ""]
    assert text.num_tokens == 6
    assert grown("", "a€".encode()[:-1])[0].text == "a\ufffd"


def test_an_end_token_ends_a_text_and_is_no_part_of_it() -> None:
    text = Text(Bytes(), [1], {END})
    assert [text.take(token) for token in (65, END)] == [False, True]
    text.finish()
    assert (text.text, text.ended, text.num_tokens) == ("A", "end", 1)
    text = Text(Bytes(), [1], {END})
    assert [text.take(token) for token in (65, 0xE2, END)] == [False, False, True]
    text.finish()
    assert (text.text, text.shown(), text.ended) == ("A\ufffd", "A\ufffd", "end"), "bytes of no character are shown too"


def test_a_file_has_a_prompt_per_line_or_json(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_bytes("a b\r\n é \n".encode())
    assert [prompt.text for prompt in read_prompts(tmp_path / "some.txt", chat=False)] == ["a b", " é "]
    lines = ['{"prompt": "a\\nb", "id": 7}', '"c"', '{"messages": [{"role": "user", "content": "d"}]}']
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    prompts = read_prompts(tmp_path / "some.jsonl", chat=True)
    assert [prompt.text for prompt in prompts] == ["a\nb", "c", ""]
    assert prompts[2].messages == ({"role": "user", "content": "d"},)
    text, _ = grown("a\nb", b"!?")
    written = json.loads(output_line(prompts[0], text))
    assert written == {"prompt": "a\nb", "id": 7, "completion": "!?", "num_tokens": 2, "ended": "length"}


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b"", "is empty; write one prompt per line"),
        ("a.txt", b"a\n\nb\n", "line 2 is empty"),
        ("a.txt", b"\xff\n", "cannot read --prompts"),
        ("a.jsonl", b'{"prompt": "a"}\n{', "line 2 is no JSON"),
        ("a.jsonl", b"3", "line 1 is neither an object nor a text"),
        ("a.jsonl", b'{"completion": "a"}', "has the field 'completion', which the output uses"),
        ("a.jsonl", b'{"prompt": 3}', "has no text in the field 'prompt'"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "'messages' must be a list of objects"),
        ("a.jsonl", b'{"prompt": "a", "id": NaN}', "line 1 is no JSON"),
        ("a.jsonl", b'{"prompt": "a", "prompt": "b"}', "the field 'prompt' stands there twice"),
        ("a.jsonl", rb'{"prompt": "a", "id": ["\ud800"]}', r"has '\\ud800', which is half a character"),
        ("a.jsonl", rb'{"messages": [{"role": "user", "content": "\udfff"}]}', r"'\\udfff', which is half a character"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(name: str, content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=sentence):
        read_prompts(tmp_path / name, chat=True)


@pytest.mark.parametrize(("name", "content"), [("a.txt", b"a\n"), ("a.jsonl", b'{"prompt": "a"}\n')])
def test_a_byte_order_mark_is_no_part_of_the_first_prompt(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
    assert [prompt.text for prompt in read_prompts(tmp_path / name, chat=False)] == ["a"]


def test_equal_prompts_are_numbered() -> None:
    assert list(occurrences([(1, 2), (3,), (1, 2), (1, 2), (3,)])) == [0, 0, 1, 2, 1]
