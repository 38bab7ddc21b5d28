"""Conversations that cannot be used: refused, or counted and logged with their keys; settings that do not fit."""

import logging
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from picture_talks import IM_END, IMAGE, VISION, asked, drawn, first, loader, sample, targets

from mplug import UsageError

pytest.importorskip("mplug_qwen_vl")
pytest.importorskip("PIL")
ANSWERED = asked([{"type": "image"}], "red")


def bomb() -> bytes:
    """A PNG of 400 million pixels in a few bytes."""
    header = struct.pack(">IIBBBBB", 20_000, 20_000, 1, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    framed = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


BAD = {
    "a damaged picture": (sample(ANSWERED, drawn("red")[:-30]), "the picture '0.png': the picture is damaged"),
    "no picture": (sample(ANSWERED, b"nothing"), "the picture '0.png': the bytes are no picture"),
    "a decompression bomb": (sample(ANSWERED, bomb()), "the picture '0.png': .*pixels"),
    "a missing file": (
        sample(asked([{"type": "image", "image": "gone.png"}], "red")),
        "the picture 'gone.png' is neither a file of the sample nor one of the data set's folder",
    ),
    "a file above the folder": (
        sample(asked([{"type": "image", "image": "../secret.png"}], "red")),
        "the picture '../secret.png' is outside of the data set's folder",
    ),
    "a link out of the folder": (
        sample(asked([{"type": "image", "image": "link.png"}], "red")),
        "the picture 'link.png' is outside of the data set's folder",
    ),
    "an absolute path": (sample(asked([{"type": "image", "image": "/etc/passwd"}], "red")), "'/etc/passwd' is outside"),
    "an address": (sample(asked([{"type": "image", "image": "https://a/b.png"}], "red")), "is not in the sample"),
    "a picture that no text mentions": (sample(asked("Hi", "red"), drawn("red")), "no message mentions its picture"),
    "a text that mentions an absent picture": (sample(ANSWERED), "its text mentions 1 pictures, and it has 0"),
    "a picture larger than a sample": (
        sample(ANSWERED, drawn("red", 256, 256)),
        r"a picture of \d+ tokens and \d+ rows is larger than a sample \(trainer.seq_length=96",
    ),
    "a picture that the model refuses": (sample(ANSWERED, drawn("red", 1000, 4)), "200 times as long as it is wide"),
    "a video without a rate": (
        sample(asked([{"type": "video", "video": ["0.png"]}], "red"), drawn("red")),
        "the video of '0.png': its number of frames in a second is unknown",
    ),
    "a video of one frame": (
        sample(asked([{"type": "video", "video": ["0.png"], "fps": 2}], "red"), drawn("red")),
        "the video of '0.png': a video of 1 frames is shorter than a patch",
    ),
    "a rate of a video that is none": (
        sample(asked([{"type": "video", "video": ["0.png"], "fps": 0}], "red"), drawn("red")),
        "message 1 has the part",
    ),
    "frames of different sizes": (
        sample(asked([{"type": "video", "video": ["0.png", "1.png"], "fps": 2}], "red"), drawn("red"), drawn("red", 9)),
        "the video of '0.png' has frames of different sizes",
    ),
    "a damaged frame of a video": (
        sample(asked([{"type": "video", "video": ["0.png", "1.png"], "fps": 2}], "red"), drawn("red"), b"nothing"),
        "the picture '1.png': the bytes are no picture",
    ),
    "a frame above the folder": (
        sample(asked([{"type": "video", "video": ["0.png", "../secret.png"], "fps": 2}], "red"), drawn("red")),
        "the picture '../secret.png' is outside of the data set's folder",
    ),
    "no answer": (sample({"messages": [{"role": "user", "content": "Hi"}]}), "it has no answer"),
    "a special token": (sample(asked("<|im_end|>", "red")), "a message has the text of a special token"),
    "no JSON": ({"json": b"{"}, "its JSON cannot be read"),
    "no messages": ({"json": b"[1]"}, "its JSON has no list 'messages'"),
    "no JSON file": ({"txt": b"Hi"}, "it has no file '.json'"),
    "an unknown part": (sample(asked([{"type": "audio"}], "red")), 'message 1 has the part {"type": "audio"}'),
    "a sample weight": (sample({**asked("Hi", "red"), "weight": 2}), "it has the weight 2, and data.sample_weights is"),
    "a negative weight": (sample({**asked("Hi", "red"), "weight": -1}), "it has the weight -1; a weight is a number"),
    "a weight that is no number": (sample({**asked("Hi", "red"), "weight": "2"}), "it has the weight '2'; a weight is"),
}


def test_what_cannot_be_used_is_logged_with_its_key_and_reason(
    made: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = made(*(bad for bad, _ in BAD.values()), sample(asked("Hi", "good")))
    (path.parent / "secret.png").write_bytes(drawn("red"))
    (path / "link.png").symlink_to(path.parent / "secret.png")
    larger = {"model.vision": {**VISION, "max_pixels": 1 << 16}, "data.shuffle_buffer_size": None}
    with caplog.at_level(logging.WARNING, "mplug.energon"):
        (only,) = loader(path, **larger, **{"data.streams": 1, "data.on_error": "skip"}).take(1)
    assert targets(only) == [*b"good", IM_END]
    lines = "\n".join(record.getMessage() for record in caplog.records)
    for number, (what, (_, words)) in enumerate(BAD.items()):
        assert re.search(rf"a sample is omitted \(.*'k{number}\.(json|txt)'.*\): .*{words}", lines), what


@pytest.mark.parametrize("what", ["no picture", "no JSON file", "a file above the folder"])
def test_what_cannot_be_used_ends_the_run_with_its_key(made: Callable[..., Path], what: str) -> None:
    bad, words = BAD[what]
    with pytest.raises(UsageError, match=rf"'k2\.(json|txt)'.*: .*{words}"):
        list(loader(made(*[sample(asked("Hi", "good"))] * 2, bad), **{"data.streams": 1}).take(3))


KINDS = {
    "a damaged picture": ("a damaged picture", "no picture", "a decompression bomb", "a damaged frame of a video"),
    "a missing file": ("a missing file", "an address"),
    "a file outside of the data set": (
        *("a file above the folder", "a link out of the folder", "an absolute path", "a frame above the folder"),
    ),
    "a picture that no text mentions": ("a picture that no text mentions",),
    "an absent picture": ("a text that mentions an absent picture",),
    "a picture that is too large": ("a picture larger than a sample",),
    "an unsupported picture": ("a picture that the model refuses", "frames of different sizes"),
    "a weight without data.sample_weights": ("a sample weight",),
}
"""The name under which samples are counted -> those samples."""


def test_samples_that_are_omitted_are_counted_by_their_kind(
    made: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    bad = [BAD[what][0] for kinds in KINDS.values() for what in kinds]
    path = made(*bad, sample(asked("Hi", "good")))
    (path.parent / "secret.png").write_bytes(drawn("red"))
    (path / "link.png").symlink_to(path.parent / "secret.png")
    larger = {"model.vision": {**VISION, "max_pixels": 1 << 16}, "data.shuffle_buffer_size": None}
    with caplog.at_level(logging.WARNING, "mplug.energon"):
        list(loader(path, **larger, **{"data.streams": 1, "data.on_error": "skip"}).take(1))
    counts = caplog.records[-1].getMessage().partition("this process has omitted ")[2]
    found = {kind: int(number) for number, kind in re.findall(r"(\d+) for ([^,]+)", counts)}
    assert found == {kind: len(samples) for kind, samples in KINDS.items()}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.task_encoder": "conversation"}, r"neither a bundled encoder \(text, image-text, conversations\)"),
        ({"data.task_encoder": "text", "data.max_rows": 9}, r"data\.max_rows is for conversations"),
        ({"data.task_encoder_options": {"pixels": 8}}, r"data\.task_encoder_options has no effect on"),
        ({"data.entries": ["images"]}, r"data\.entries has no effect on"),
        ({"data.template": "nowhere"}, r"data\.template 'nowhere' is neither a built-in template"),
        ({"data.packing_buffer_size": 9, "data.max_documents": 99}, r"data\.max_documents=99 is more than trainer"),
        ({"model.vision": None}, r"supplies samples with media, and models/qwen-vl takes none"),
    ],
)
def test_settings_that_do_not_fit_are_refused(conversations: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        loader(conversations, **changes)


def test_a_typed_data_set_is_refused(text_set: Path) -> None:
    with pytest.raises(UsageError, match="it is a TextSample; prepare data sets of conversations with --sample"):
        first(text_set)


def test_a_custom_encoder_may_supply_media(text_set: Path, encoders: str) -> None:
    own: dict[str, Any] = {"data.task_encoder": f"{encoders}:Seeing", "data.entries": ["streams"]}
    batch = first(text_set, 2, **own)
    pictures = [(row == IMAGE).sum() * 4 for row in batch["tokens"]]
    assert batch["patch_lengths"].tolist() == [pictures]
    for wrong, words in (
        ("media", r"returns no 'media' \(it returns tokens, labels\)"),
        ("tokens of no picture", r"returns tokens that do not fit its media: sample 0 of the micro batch"),
    ):
        with pytest.raises(UsageError, match=words):
            first(text_set, **own, **{"data.task_encoder_options": {"wrong": wrong}})
