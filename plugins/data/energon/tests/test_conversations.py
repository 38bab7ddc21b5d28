"""Conversations with pictures: their tokens, targets and pictures, packed and alone; their order and runs."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from mplug_energon import Energon
from mplug_energon.packing import Size, pack
from pair_runs import checkpoint_of, errors, failures, follow, worst
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
    loader,
    of_picture,
    pictured,
    sample,
    targets,
)

from mplug import MicroBatch, UsageError
from mplug.training.assembly import build_loader
from mplug_testing import DataSuite, run_workers
from mplug_testing.harness import tiny_run
from mplug_testing.parity import require_parity
from mplug_testing.resume import require_exact_resume

pytest.importorskip("mplug_qwen_vl")
pytest.importorskip("PIL")

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


def colours_of(batch: MicroBatch) -> list[str]:
    segments = batch["patches"][0].split([length for length in batch["patch_lengths"][0].tolist() if length])
    channels = [segment.view(len(segment), 3, -1).mean((0, 2)).argmax() for segment in segments]
    return [list(COLOURS)[int(channel)] for channel in channels]


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


def test_a_picture_in_an_answer_and_behind_the_last_answer_is_no_target(made: Callable[..., Path]) -> None:
    answer = {"role": "assistant", "content": [{"type": "text", "text": "this:"}, {"type": "image"}]}
    after = {"role": "user", "content": [{"type": "image"}]}
    record = {"messages": [{"role": "user", "content": "Show"}, answer, after]}
    batch = first(made(sample(record, drawn("red"), drawn("blue"))))
    assert targets(batch) == [*b"this:", IM_END]
    assert colours_of(batch) == ["red"]


# Packing.


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9)), max_size=40), st.integers(1, 5))
def test_no_sample_exceeds_a_budget_and_every_conversation_is_in_one(sizes: list[tuple[int, int]], most: int) -> None:
    bins = pack([Size(*size) for size in sizes], Size(20, 9), most)
    assert sorted(item for one in bins for item in one) == list(range(len(sizes)))
    for one in bins:
        assert 0 < len(one) <= most
        assert sum(sizes[item][0] for item in one) <= 20
        assert sum(sizes[item][1] for item in one) <= 9


def test_large_conversations_are_placed_first_and_leave_the_least_room() -> None:
    sizes = [Size(5, 0), Size(3, 0), Size(6, 0), Size(2, 0), Size(4, 0)]
    assert pack(sizes, Size(10, 1), 9) == [[0, 1, 3], [2, 4]]
    assert pack([Size(1, 3), Size(1, 3), Size(1, 2)], Size(10, 5), 9) == [[0, 2], [1]]


def documents(batch: MicroBatch) -> list[tuple[tuple[int, ...], ...]]:
    """(tokens, labels, positions, coordinates of rows) of each document with an answer."""
    found = []
    for row, lengths in enumerate(batch["document_lengths"].tolist()):
        ends = [length for length in lengths if length]
        columns = [batch[name][row].split(ends) for name in ("tokens", "labels", "positions", "coordinates")]
        for tokens, labels, positions, coordinates in zip(*columns, strict=True):
            assert positions.tolist() == list(range(len(positions)))
            if any(label >= 0 for label in labels.tolist()):
                entries = (tokens, labels, coordinates.flatten())
                found.append(tuple(tuple(entry.tolist()) for entry in entries))
    return found


def test_packed_conversations_are_those_that_have_a_sample_of_their_own(conversations: Path) -> None:
    whole = {"data.streams": 1, "data.shuffle_buffer_size": None, "data.max_samples_per_sequence": None}
    alone = list(loader(conversations, **whole).take(40))
    expected = set()
    for batch in alone:
        for row in range(len(batch["tokens"])):
            end = batch["tokens"][row].tolist().index(256)
            entries = (batch[name][row, :end] for name in ("tokens", "labels", "coordinates"))
            expected.add(tuple(tuple(entry.flatten().tolist()) for entry in entries))
    found, rows = list[Any](), list[int]()
    single = {"data.max_rows": 24, "trainer.micro_batch_size": 1}
    for batch in loader(conversations, **whole, **PACKED, **single).take(40):
        found += documents(batch)
        rows.append(int(batch["patch_lengths"].sum()))
    assert len(found) > 60  # of 40 samples
    assert set(found) == expected
    assert len(expected) == 40
    assert max(rows) == 24


def test_a_long_conversation_keeps_whole_pictures(made: Callable[..., Path]) -> None:
    """The picture that does not fit whole is not in the sample, nor what follows it."""
    begin = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    long = {"messages": [*begin, *asked([{"type": "text", "text": "c" * 5}, {"type": "image"}], "d" * 50)["messages"]]}
    path = made(sample(long, drawn("red", 32, 32)))
    batch = first(path, **{"trainer.seq_length": 50})  # the picture would begin at 34 and end at 52
    tokens = batch["tokens"][0].tolist()
    assert tokens[33:] == [*b"c", *[256] * 16]
    assert batch["vision_rows"].max() == -1
    assert targets(batch) == [*b"b", IM_END]
    with pytest.raises(UsageError, match=r"'k0\.json', 'k0\.0\.png': it has \d+ tokens and 64 rows"):
        first(path, **{"trainer.seq_length": 50, "data.too_long": "refuse"})
    assert START in first(path, **{"data.max_rows": 64})["tokens"][0].tolist()
    with pytest.raises(UsageError, match=r"a picture of 18 tokens and 64 rows is larger than a sample"):
        first(path, **{"data.max_rows": 63})


# Weights.

WEIGHTED = {"data.sample_weights": True}


def weighted(number: int) -> dict[str, bytes]:
    """The question of `pictured`, with a weight from 0 to 2."""
    files = pictured(number)
    return {**files, "json": json.dumps({**json.loads(files["json"]), "weight": number % 5 / 2}).encode()}


def test_the_weight_of_a_conversation_is_that_of_each_of_its_tokens(made: Callable[..., Path]) -> None:
    path = made(*map(weighted, range(8)))
    whole = {"data.shuffle_buffer_size": None, "data.max_samples_per_sequence": None, "data.max_documents": 4}
    own = {**PACKED, "data.packing_buffer_size": 8, **whole, **WEIGHTED}
    seen = dict[int, float]()
    for batch in loader(path, **own, **{"data.streams": 1}).take(6):
        for row, lengths in enumerate(batch["document_lengths"].tolist()):
            ends = [length for length in lengths if length]
            columns = (batch[name][row].split(ends) for name in ("tokens", "labels", "loss_weights"))
            for tokens, labels, weights in zip(*columns, strict=True):
                (weight,) = weights.unique().tolist()
                if any(label >= 0 for label in labels.tolist()):
                    text = bytes(token for token in tokens.tolist() if token < 256).decode()
                    seen[int(re.search(r"(\d+):", text)[1])] = weight  # type: ignore[index]
    assert seen == {number: number % 5 / 2 for number in range(8)}
    assert "loss_weights" not in first(made(pictured(1), folder="plain"))


LAYOUTS = pytest.mark.wide("layouts")


@pytest.mark.parametrize(
    "layout",
    ["cp2", *(pytest.param(layout, marks=LAYOUTS) for layout in ("dp2", "tp2", "pp2", "dp2 parallel.balance=true"))],
)
@pytest.mark.wide("data")
def test_a_layout_trains_packed_conversations_with_weights_as_one_process_does(
    prepare: Callable[..., Path], tmp_path: Path, layout: str
) -> None:
    parts = {part: [{f"{part}{n:02}": weighted(n) for n in range(24)}] for part in ("train", "val")}
    own = {**TINY, **PACKED, **WEIGHTED, "data.path": str(prepare(tmp_path / "set", parts, "CrudeWebdataset"))}
    require_parity({**own, "model.num_kv_heads": 2, "model.vision": {**VISION, "typical_patches": 16}}, layout)


# The order, and runs.


def blended(folder: Path, conversations: Path, made: Callable[..., Path]) -> Path:
    """A metadataset of three parts of conversations and one part of others, whose answers are 'green'."""
    other = made(*(sample(asked(f"{number}?<image>", "green"), drawn("green")) for number in range(8)))
    parts = [{"path": str(conversations), "weight": 3}, {"path": str(other), "weight": 1}]
    named = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    blend = folder / "blend.yaml"
    blend.write_text(yaml.safe_dump({**named, "splits": {"train": {"blend": parts}}}))
    return blend


def numbers(batch: MicroBatch, mark: bytes = b":") -> list[int]:
    """The number that the question of each sample begins with; those with another mark behind it are left out."""
    texts = (bytes(token for token in row if token < 256) for row in batch["tokens"].tolist())
    found = (re.match(rb"user\n(\d+)" + mark, text) for text in texts)
    return [int(one[1]) for one in found if one]


def test_a_blend_of_conversations_follows_its_weights(
    tmp_path: Path, conversations: Path, made: Callable[..., Path]
) -> None:
    batches = list(loader(blended(tmp_path, conversations, made)).take(160))
    counts = [sum(len(numbers(batch, mark)) for batch in batches) for mark in (b":", rb"\?")]
    assert sum(counts) == 160
    assert 22 <= counts[1] <= 58  # a quarter, within more than three standard deviations


def test_an_epoch_that_is_resumed_on_two_ranks_has_every_conversation_once(conversations: Path) -> None:
    own = {"data.streams": 4, "trainer.micro_batch_size": 2, "data.shuffle_buffer_size": None}
    whole = loader(conversations, **own)
    seen = [number for batch in whole.take(16) for number in numbers(batch)]
    state = whole.state_dict()
    for rank in range(2):
        run = tiny_run({**TINY, **own, "data.path": str(conversations), "parallel.layout": "dp2"})
        run.device, run.rank = "cpu", rank
        again = build_loader(run, "train")
        again.load_state_dict(state)
        seen += [number for batch in again.take(24) for number in numbers(batch)]
    assert sorted(seen) == list(range(40))


@pytest.mark.wide("data")
def test_a_run_with_pictures_that_resumes_on_two_ranks_has_the_losses_of_one_process(
    conversations: Path, tmp_path: Path
) -> None:
    """Stopped behind the first of two steps of 16 samples; an epoch has 40."""
    changes = {**TINY, "data.path": str(conversations), "trainer.precision": "fp64", "trainer.global_batch_size": 16}
    own = {**changes, "data.streams": 4, "trainer.micro_batch_size": 4, "trainer.eval_samples": 8}
    own |= {"checkpoint.asynchronous": False, "schedule.warmup_steps": 0}
    expected = follow(own, tmp_path / "whole")
    source, layout = checkpoint_of(tmp_path / "whole"), {"parallel.layout": "dp2"}
    ranks = run_workers(2, follow, {**own, **layout}, tmp_path / "resumed", source, timeout=240)
    assert [sorted(rank.losses) for rank in ranks] == [[2], [2]]
    assert failures(worst(errors(ranks, expected))) == []


FEWER_AND_MORE = [
    ("dp4", "dp2"),
    *(pytest.param(*one, marks=pytest.mark.wide("data")) for one in (("dp2", ""), ("", "dp4"))),
]


@pytest.mark.parametrize(("before", "after"), FEWER_AND_MORE)
def test_packed_conversations_of_a_blend_resume_exactly_under_another_number_of_ranks(
    tmp_path: Path, conversations: Path, made: Callable[..., Path], before: str, after: str
) -> None:
    blend = blended(tmp_path, conversations, made)
    own = {**TINY, **PACKED, "data.path": str(blend), "data.streams": 4, "trainer.micro_batch_size": 2}
    require_exact_resume(own, before, [8, 4, 12], after, count=16)


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.wide("data")
def test_worker_processes_resume_exactly(conversations: Path) -> None:
    own = {"data.path": str(conversations), "data.num_workers": 1, "trainer.micro_batch_size": 2}
    require_exact_resume({**TINY, **PACKED, **own}, "dp2", [8], "", count=8)


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
