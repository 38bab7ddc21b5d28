"""Conversations as tokens: the tokens of media, and texts among them, take the places of marks."""

from types import SimpleNamespace
from typing import Any

import pytest

from mplug_streams import Medium
from mplug_tokenization.vocabulary import Encoded

pytest.importorskip("megatron.energon")

from mplug_energon.writing import Writer


def test_a_mark_stands_for_a_picture_with_its_crops_and_the_texts_among_them() -> None:
    """Two pictures one after the other: each has its own mark, though its tokens have the mark several times."""
    crops = Medium((5, 6, 7, 5, 6, 7), 2, None, mark=(5,), texts=((0, "a"), (3, "bc")))
    processor: Any = SimpleNamespace(placeholders=frozenset({6}), prepare=lambda _: crops)
    vocabulary: Any = SimpleNamespace(
        special={"<start>": 5},
        vocab_size=300,
        has_special=lambda _: False,
        encode=lambda text: [*text.encode()],
        encode_answers=lambda *_: Encoded([1, 5, 5, 2], [False, False, False, True]),
    )
    template: Any = SimpleNamespace(
        takes_parts=True, name="own", render=lambda *_: SimpleNamespace(text="", answers=())
    )
    content = [{"type": "image"}, {"type": "image"}]
    talk: Any = SimpleNamespace(texts=(), messages=[{"content": content}], end=1, tools=None)
    written = Writer(template, vocabulary, processor).write(talk, [crops, crops])
    picture = [*b"a", 5, 6, 7, *b"bc", 5, 6, 7]
    assert written.tokens == [1, *picture, *picture, 2]
    assert written.begins == [1, 1 + len(picture)]
    assert [medium.tokens for medium in written.media] == [tuple(picture)] * 2
