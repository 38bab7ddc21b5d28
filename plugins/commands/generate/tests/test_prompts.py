"""Files of prompts, and texts that grow token by token: characters of several bytes, end tokens, stop words."""

import json
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mplug_generate.pictures import Encoded, encoded
from mplug_generate.prompts import Prompt, Shown, given_prompt, occurrences, output_line, read_prompts, video_of

from mplug.errors import UsageError
from mplug_sampling.text import Text
from mplug_streams import Medium

Image = pytest.importorskip("PIL.Image")
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


@settings(max_examples=60)
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


def test_parts_of_a_line_are_texts_and_files_beside_it(tmp_path: Path) -> None:
    picture = {"type": "image", "image": "in/a.png"}
    words = [{"type": "text", "text": word} for word in ("b", "c")]
    lines = [
        {"prompt": [words[0], picture, picture, words[1]]},
        {"messages": [{"role": "user", "content": [picture, words[0]]}, {"role": "assistant", "content": "d"}]},
        {"messages": [{"role": "user", "content": words}]},
    ]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, lines)))
    file = Shown.image(tmp_path / "in" / "a.png")
    asked, chat, text = read_prompts(tmp_path / "some.jsonl", chat=True)
    (plain, *_), mark = read_prompts_of(tmp_path, lines[:1]), {"type": "image"}
    assert (plain.text, plain.media, plain.pieces()) == ("bc", (file, file), ["b", "", "c"])
    assert asked.media == (file, file)
    assert asked.messages == ({"role": "user", "content": [words[0], mark, mark, words[1]]},)
    assert chat.media == (file,)
    assert chat.messages == (
        {"role": "user", "content": [mark, words[0]]},
        {"role": "assistant", "content": "d"},
    )
    assert (text.media, text.messages) == ((), ({"role": "user", "content": "bc"},))
    assert json.loads(output_line(chat, grown("", b"!")[0]))["messages"] == lines[1]["messages"]


def test_a_video_is_a_list_of_frames_or_a_folder_of_them(tmp_path: Path) -> None:
    frames = tmp_path / "frames"
    frames.mkdir()
    with pytest.raises(UsageError, match=r"--video '.*frames' has no frames, which are files \.png"):
        video_of(frames, 2)
    for name in ("10.png", "2.PNG", "notes.txt"):
        (frames / name).touch()
    shown = Shown(frames, (frames / "2.PNG", frames / "10.png"), 2)
    assert video_of(frames, 2) == shown
    asked = given_prompt("what?", [Shown.image(tmp_path / "a.png"), shown], chat=True)
    text, mark = {"type": "text", "text": "what?"}, {"type": "video"}
    assert asked.messages == ({"role": "user", "content": [{"type": "image"}, mark, text]},)
    video = {"type": "video", "video": ["frames/2.PNG", "frames/10.png"], "fps": 2}
    (plain,) = read_prompts_of(tmp_path, [{"prompt": [video, text]}])
    assert (plain.media, plain.places) == ((Shown(shown.files[0], shown.files, 2.0),), (0,))
    for wrong in ({"fps": 0}, {"fps": None}, {"fps": "2"}, {"video": []}, {"video": "a.mp4"}, {"video": [1]}):
        with pytest.raises(UsageError, match=r"has a part that is neither .* nor .* FRAMES IN A SECOND"):
            read_prompts_of(tmp_path, [{"prompt": [{**video, **wrong}]}])


def test_marks_of_images_and_videos_stand_in_their_order(tmp_path: Path) -> None:
    frames = tmp_path / "frames"
    frames.mkdir()
    for number, size in enumerate([(3, 3), (3, 3), (4, 3)]):
        Image.new("RGB", size).save(frames / f"{number}.png")
    picture, video = Shown.image(frames / "0.png"), video_of(frames, 2)
    prompt = given_prompt("", [picture, replace(video, files=video.files[:2])], chat=False)
    processor: Any = Videos((7,))
    assert encoded(prompt, [7, 1, 6], processor, list, of_folder=True).tokens == (8, 9, 9, 8, 1, 5, 9, 5)
    with pytest.raises(UsageError, match=r"in another order than these, which are image, video; put"):
        encoded(prompt, [6, 7], processor, list, of_folder=True)
    for of, told in (
        (Videos((7,)), r"its frames have different sizes: '2.png' has 4 x 3 pixels, not 3 x 3; use another video"),
        (Words((7,)), r"the video '.*frames' cannot be used: "),
    ):
        with pytest.raises(UsageError, match=told):
            in_place(given_prompt("", [video], chat=False), [6], (7,), of_run=False, processor=of)
    with pytest.raises(UsageError, match=r"cannot be used: the model takes no videos; use another video"):
        in_place(given_prompt("", [prompt.media[1]], chat=False), [6], (7,), of_run=False)


def read_prompts_of(folder: Path, lines: list[Any]) -> list[Prompt]:
    (folder / "plain.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return read_prompts(folder / "plain.jsonl", chat=False)


class Words:
    """A processor whose pictures are marked by 7 and have the tokens 8, 9, 9, 8."""

    entries, placeholders = (), frozenset({9})

    def __init__(self, mark: tuple[int, ...]) -> None:
        self.mark = mark

    def prepare(self, content: Any, num_pictures: int = 1) -> Medium:
        return Medium((8, 9, 9, 8), 2, None, self.mark)


class Videos(Words):
    """It takes videos too, which are marked by 6 and have the tokens 5, 9, 5."""

    def prepare_video(self, content: Any, rate: float, encode: Any) -> Medium:
        return Medium((5, 9, 5), len(content), None, (6,))


def in_place(
    prompt: Prompt, tokens: list[int], mark: tuple[int, ...], *, of_run: bool, processor: Any = None
) -> Encoded:
    processor = processor or Words(mark)
    return encoded(prompt, tokens, processor, lambda text: [ord(letter) for letter in text], of_folder=not of_run)


def test_pictures_take_the_place_of_their_marks_or_stand_before_the_text_of_a_run(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    Image.new("RGB", (3, 3)).save(picture)
    shown = Shown.image(picture)
    two = given_prompt("AB", [shown] * 2, chat=False)
    for mark, tokens in (((7,), [1, 7, 2, 7]), ((5, 7), [1, 5, 7, 2, 5, 7])):
        found = in_place(two, tokens, mark, of_run=False)
        assert found == Encoded((1, 8, 9, 9, 8, 2, 8, 9, 9, 8), (1, 2))
    assert in_place(two, [65, 66], (7,), of_run=True).tokens == (8, 9, 9, 8, 8, 9, 9, 8, 65, 66)
    between = Prompt("it", "AB", media=(shown,), places=(1,))
    assert in_place(between, [65, 66], (), of_run=True).tokens == (65, 8, 9, 9, 8, 66)
    for tokens, of_run, sentence in (
        ([65, 66], False, "--prompt has 2 images, and its text has the marks of 0; add --chat, or write the mark"),
        ([7, 7, 7], True, "--prompt has 2 images, and its text has the marks of 3; write the mark of an image once"),
        ([7, 9, 7], True, "--prompt has the token 9 in its text, which stands for a part of an image; remove it"),
    ):
        with pytest.raises(UsageError, match=sentence):
            in_place(two, tokens, (7,), of_run=of_run)


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
        ("a.jsonl", b'{"prompt": [{"type": "video", "video": "a.mp4"}]}', "'prompt' has a part that is neither"),
        ("a.jsonl", b'{"messages": [{"role": "u", "content": [{"type": "image"}]}]}', "'content' has a part that is"),
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


def test_a_stop_word_longer_than_the_text_costs_no_time() -> None:
    text, began = Text(Bytes(), [1], {END}, ["x" * 10**6]), time.perf_counter()
    for _ in range(100):
        text.take(ord("y"))
        assert text.shown() == "y"
    assert time.perf_counter() - began < 1  # more than 10 s if each length of the word is tried for each token
