"""Conversations with pictures: their tokens, targets and pictures, packed and alone; their order and runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mplug_energon import Energon
from picture_talks import (
    COLOURS,
    END,
    IM_END,
    IMAGE,
    PACKED,
    START,
    TINY,
    VIDEO,
    VISION,
    asked,
    chatml,
    drawn,
    first,
    of_picture,
    sample,
    targets,
)

from mplug import UsageError
from mplug_testing import DataSuite

pytest.importorskip("mplug_qwen_vl")
pytest.importorskip("PIL")
from energon_numbers import colours_of

# Tokens, targets and pictures.


def test_pictures_stand_where_the_parts_mention_them_and_only_answers_are_targets(made: Callable[..., Path]) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}, {"type": "text", "text": "?"}]
    batch = first(made(sample(asked(parts, "red blue"), drawn("red"), drawn("blue", 16, 8))))
    question = [*of_picture(1), *b"and", *of_picture(2), *b"?"]
    expected = chatml(("user", question), ("assistant", b"red blue"))
    tokens = batch["tokens"][0].tolist()
    assert tokens[: len(expected)] == expected
    assert set(tokens[len(expected) :]) == {256}
    assert targets(batch) == [*b"red blue", IM_END]
    assert batch["patch_lengths"].tolist() == [[4, 8]]
    assert [row for row in batch["vision_rows"][0].tolist() if row >= 0] == [0, 1, 2]
    assert batch["vision_rows"][0].tolist().index(0) == tokens.index(IMAGE)
    colours = batch["patches"][0].view(12, 3, -1).mean(-1)  # the channel with the largest mean
    assert colours[:4].argmax(1).tolist() == [0] * 4
    assert colours[4:].argmax(1).tolist() == [2] * 8


def test_a_mark_in_the_text_stands_for_the_next_picture(made: Callable[..., Path]) -> None:
    path = made(sample(asked("<image>or<image>", "first"), drawn("red"), drawn("blue")))
    expected = chatml(("user", [*of_picture(1), *b"or", *of_picture(1)]), ("assistant", b"first"))
    assert first(path)["tokens"][0].tolist()[: len(expected)] == expected
    with pytest.raises(UsageError, match=r"no message mentions its picture '0\.png'"):
        first(path, **{"data.picture_mark": None})


def test_pictures_may_be_named_and_lie_in_the_folder_of_the_data_set(made: Callable[..., Path]) -> None:
    parts = [{"type": "image", "image": name} for name in ("art/blue.png", "1.png", "k0.0.png")]
    path = made(sample(asked(parts, "blue green red"), drawn("red"), drawn("green")))
    (path / "art").mkdir()
    (path / "art" / "blue.png").write_bytes(drawn("blue"))
    assert colours_of(first(path)) == ["blue", "green", "red"]


def test_a_conversation_may_list_its_pictures(made: Callable[..., Path]) -> None:
    record = {**asked([{"type": "image"}, {"type": "image"}], "blue red"), "images": ["blue.png", "0.png"]}
    path = made(sample(record, drawn("red")))
    (path / "blue.png").write_bytes(drawn("blue"))
    assert colours_of(first(path)) == ["blue", "red"]


def test_eleven_pictures_come_in_the_order_of_their_numbers(made: Callable[..., Path]) -> None:
    colours = [list(COLOURS)[number % 3] for number in range(11)]
    record = asked([{"type": "image"}] * 11, "many")
    assert colours_of(first(made(sample(record, *map(drawn, colours))))) == colours


def filmed(*colours: str, **stated: Any) -> dict[str, bytes]:
    frames = [{"type": "video", "video": [f"{number}.png" for number in range(len(colours))], **stated}]
    return sample(asked(frames, "it moves"), *map(drawn, colours))


MOVING = ("red", "green", "blue")


def test_a_video_is_a_list_of_frames_whose_times_are_positions(made: Callable[..., Path]) -> None:
    batch = first(made(filmed(*MOVING, fps=0.5)), **{"model.vision": {**VISION, "tokens_per_second": 2}})
    expected = chatml(("user", [START, VIDEO, VIDEO, END]), ("assistant", b"it moves"))
    assert batch["tokens"][0].tolist()[: len(expected)] == expected
    at = expected.index(VIDEO)
    before, later = batch["coordinates"][0, at : at + 2, 0].tolist()
    assert later - before == 8, "two positions in a second, and two frames of two seconds in a patch"
    assert colours_of(batch) == ["red", "blue"]


def test_a_video_has_the_times_of_its_frames_in_the_text(made: Callable[..., Path]) -> None:
    question = [START, *b"<0.2 seconds>", START, VIDEO, END, *b"<1.0 seconds>", START, VIDEO, END, END]
    expected = chatml(("user", question), ("assistant", b"it moves"))
    path = made(filmed(*MOVING))
    for rate, time in ((2, b"<0.2"), (1, b"<0.5")):
        batch = first(path, **{"data.video_fps": rate, "trainer.seq_length": 128})
        tokens = batch["tokens"][0].tolist()
        assert bytes(tokens[tokens.index(START) + 1 :][:4]) == time
    assert (
        first(path, **{"data.video_fps": 2, "trainer.seq_length": 128})["tokens"][0].tolist()[: len(expected)]
        == expected
    )
    assert targets(batch) == [*b"it moves", IM_END]
    with pytest.raises(
        UsageError, match=r"the video of '0\.png': its number of frames in a second is unknown; add 'fps'"
    ):
        first(path)


def test_the_marks_that_a_template_writes_are_replaced_by_the_tokens_of_the_pictures(
    made: Callable[..., Path], tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
        "{% if part['type'] != 'text' %}<|see|><|pad|><|seen|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    special = ["<|im_start|>", "<|im_end|>", "<|see|>", "<|seen|>", "<|pad|>"]
    own = {"data.template": str(template), "data.special_tokens": special}
    numbers = {"start_token": 259, "end_token": 260, "image_token": 261, "video_token": 303}
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}]
    path = made(sample(asked(parts, "red blue"), drawn("red", 16, 8), drawn("blue")))
    batch = first(path, **own, **{"model.vision": {**VISION, **numbers}})
    question = [*b"a", 259, 261, 261, 260, 259, 261, 260]
    expected = chatml(("user", question), ("assistant", b"red blue"))
    assert batch["tokens"][0].tolist()[: len(expected)] == expected
    assert targets(batch) == [*b"red blue", IM_END]
    films = [{"type": "video", "video": ["0.png", "1.png"], "fps": 2}] * 2
    path = made(sample(asked(films, "still"), drawn("red"), drawn("blue")), folder="films")
    batch = first(path, **own, **{"model.vision": {**VISION, **numbers, "video_token": 261, "image_token": 303}})
    film = [259, *b"<0.2 seconds>", 259, 261, 260, 260]
    expected = chatml(("user", [*film, *film]), ("assistant", b"still"))
    assert batch["tokens"][0].tolist()[: len(expected)] == expected
    path = made(sample(asked(parts, "red blue"), drawn("red", 16, 8), drawn("blue")), folder="pictures")
    with pytest.raises(UsageError, match=r"writes marks of 0 of its 2 pictures.*use the tokenizer and the template"):
        first(path, **own)


VISION_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}<|im_start|>system\nHi<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message.role }}\n{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' or 'image' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION_TOKENS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def published(folder: Path) -> Any:
    """A folder of a published tokenizer of bytes with a template for pictures, and the library's tokenizer of it."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    alphabet = {byte: number for number, byte in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(alphabet, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(VISION_TOKENS)
    library = transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=VISION_TEMPLATE)
    library.save_pretrained(folder)
    return library


def test_the_tokens_of_a_published_folder_are_those_of_the_library(made: Callable[..., Path], tmp_path: Path) -> None:
    library = published(tmp_path / "published")
    numbers = {text: library.convert_tokens_to_ids(text) for text in VISION_TOKENS}
    parts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Which is red?"}]
    record = asked(parts, "Both.")
    vision = {
        "start_token": numbers["<|vision_start|>"],
        "end_token": numbers["<|vision_end|>"],
        "image_token": numbers["<|image_pad|>"],
        "video_token": numbers["<|video_pad|>"],
    }
    folder = Energon.folder_settings(
        tmp_path / "published", "huggingface", {"path": f"{tmp_path}/published/tokenizer.json"}
    )
    batch = first(
        made(sample(record, drawn("red", 16, 8), drawn("red"))),
        **{f"data.{name}": value for name, value in folder.items()},
        **{"model.vision": {**VISION, **vision}, "trainer.seq_length": 128},
    )
    text = library.apply_chat_template(record["messages"], tokenize=False)
    text = text.replace("<|image_pad|>", "<|image_pad|>" * 2, 1)  # the tokens of the first picture
    expected = library(text, add_special_tokens=False)["input_ids"]
    assert batch["tokens"][0].tolist()[: len(expected)] == expected
    assert library.decode(targets(batch)) == "Both.<|im_end|>"


@pytest.mark.wide(
    "data",
    quick=[
        "test_every_field_of_its_config_has_an_effect",
        "test_a_micro_batch_is_what_the_contract_says",
        "test_a_run_finds_no_fault_in_its_micro_batches",
        "test_text_survives_the_tokenizer",
        "test_its_state_is_a_snapshot",
    ],
)
class TestConversations(DataSuite):
    plugin = "energon"
    settings = {**TINY, **PACKED, "data.streams": 4}
    examples = {
        "train_part": ["no-such-part"],
        "validation_part": ["no-such-part"],
        "task_encoder": ["text"],
        "task_encoder_options": [{"no_such_option": 1}],
        "entries": [["no_such_entry"]],
        "tokenizer": ["no-such-tokenizer"],
        "tokenizer_options": [{"no_such_option": 1}],
        "template": ["llama3"],
        "special_tokens": [["<|im_start|>", "<|im_end|>", "?"]],
        "picture_mark": [":"],
        "max_samples_per_sequence": [1, 5],
        "max_pixels": [65],
        "max_rows": [9],
        "max_documents": [3],
        "packing_buffer_size": [2],
    }
    without_effect = {
        "num_workers": "workers read the samples that the main process would read (a test resumes with some)",
        "sample_weights": "no sample of this set has a weight (a test above has some)",
        "video_fps": "no sample of this set has a video (a test above has one)",
        "on_error": "every sample of this set can be used (tests above have others)",
        "too_long": "every sample of this set is short enough (a test above has another)",
        "template_variables": "chatml has no variables; a template file sees them (mplug_tokenization tests it)",
    }

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def of_conversations(cls, conversations: Path) -> None:
        cls.settings = {**cls.settings, "data.path": str(conversations)}
