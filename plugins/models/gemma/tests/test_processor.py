"""The processor of Gemma 3 makes what the library's makes, from files of all modes; what it cannot take is refused."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from coded_pictures import MODES, coded_picture
from mplug_gemma.processor import ACROSS, BEFORE, BEHIND, VisionProcessor, crops_of
from mplug_gemma.stream import groups_of, tower_order
from mplug_gemma.vision import PanAndScan, VisionConfig

from mplug_nn.pictures import decode_picture, resize_frames
from mplug_streams import Medium

Image = pytest.importorskip("PIL.Image")
library = pytest.importorskip("transformers.models.gemma3.image_processing_pil_gemma3")
images = pytest.importorskip("transformers.image_utils")
IDS = {"image_token": 55, "start_token": 56, "end_token": 57, "blank_line_token": 58}
SMALL = VisionConfig(image_size=24, patch_size=4, tokens_per_image=4, hidden_size=8, num_attention_heads=1, **IDS)
"""Pictures of 6 x 6 patches, in squares of 3 x 3."""


def test_patches_are_those_of_the_library() -> None:
    named: dict[str, Any] = {"pixel_mean": (0.5, 0.4, 0.3), "pixel_std": (0.5, 0.3, 0.2)}
    vision = VisionConfig(**{**SMALL.model_dump(), **named})
    size = {"height": vision.image_size, "width": vision.image_size}
    theirs = library.Gemma3ImageProcessorPil(size=size, image_mean=vision.pixel_mean, image_std=vision.pixel_std)
    processor, side = VisionProcessor(vision), vision.patch_size
    for number in range(200):
        data = coded_picture(number, MODES[number % len(MODES)])
        pixels = theirs(images.load_image(Image.open(io.BytesIO(data))), return_tensors="pt")["pixel_values"][0]
        medium = processor.prepare(decode_picture(data))
        expected = torch.nn.functional.unfold(pixels[None], side, stride=side)[0].T  # the library's convolution
        assert (medium.values - expected).abs().max() < 1e-5
        assert medium.rows == vision.num_patches


def test_a_picture_has_a_token_for_each_pooled_row_between_a_start_and_an_end() -> None:
    processor = VisionProcessor(SMALL)
    assert pictures(1)[0].tokens == (58, 56, 55, 55, 55, 55, 57, 58)
    assert processor.placeholders == {55}
    plain = VisionProcessor(SMALL.model_copy(update={"blank_line_token": None}))
    assert plain.prepare(decode_picture(coded_picture(1, "RGB"))).tokens == (56, 55, 55, 55, 55, 57)


def pictures(*numbers: int) -> list[Medium]:
    return [VisionProcessor(SMALL).prepare(decode_picture(coded_picture(number, "RGB"))) for number in numbers]


def test_squares_of_patches_are_consecutive_rows() -> None:
    order = tower_order(6, 3)
    assert order[:9].tolist() == [0, 1, 2, 6, 7, 8, 12, 13, 14]
    assert order[9:12].tolist() == [3, 4, 5]
    assert order[18] == 18
    assert order.sort().values.tolist() == list(range(36))


def test_entries_refer_to_the_rows_of_each_picture() -> None:
    one, two, three = pictures(1, 2, 4)
    text = [[7, *one.tokens, 8, *two.tokens], [9, *three.tokens, *[1] * 9]]
    entries = VisionProcessor(SMALL).entries_of(torch.tensor(text), [[one, two], [three]])
    assert tuple(entries) == VisionProcessor(SMALL).entries
    rows = entries["vision_rows"]
    assert rows[0][rows[0] >= 0].tolist() == list(range(8))
    assert rows[1][rows[1] >= 0].tolist() == [8, 9, 10, 11]
    assert torch.equal(rows >= 0, torch.tensor(text) == 55)
    order = tower_order(6, 3)
    assert torch.equal(entries["patches"][0], torch.cat([medium.values[order] for medium in (one, two, three)]))
    assert entries["patch_lengths"].tolist() == [[36, 36, 36]]
    places = entries["patch_places"][0, :36]
    assert torch.equal(places[:, 0] * 6 + places[:, 1], order)
    assert (places[:, 2:] == 6).all()
    groups = entries["position_groups"]
    assert groups[0][rows[0] >= 0].tolist() == [0] * 4 + [1] * 4
    assert groups[1][rows[1] >= 0].tolist() == [0] * 4
    assert torch.equal(groups >= 0, rows >= 0)


def test_groups_are_those_of_the_library() -> None:
    modeling = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    tokens = torch.where(torch.rand(20, 40, generator=torch.Generator().manual_seed(2)) < 0.6, 55, 3)
    expected = modeling.get_block_sequence_ids_for_mask((tokens == 55).to(torch.int64))
    assert torch.equal(groups_of(tokens, 55), expected)


def test_a_micro_batch_without_a_picture_has_one_square_that_nothing_refers_to() -> None:
    entries = VisionProcessor(SMALL).entries_of(torch.arange(6)[None], [[]])
    assert entries["patches"].shape == (1, 9, SMALL.patch_width)
    assert entries["patch_lengths"].tolist() == [[9]]
    assert entries["vision_rows"].tolist() == entries["position_groups"].tolist() == [[-1] * 6]


def test_placeholders_and_pictures_that_do_not_fit_are_refused() -> None:
    processor, (one, two) = VisionProcessor(SMALL), pictures(1, 2)
    tokens = torch.tensor([[5, *one.tokens, 6]])
    with pytest.raises(ValueError, match="sample 0 of the micro batch: it has 2 pictures of 4 tokens, and 4 tokens"):
        processor.entries_of(tokens, [[one, two]])
    with pytest.raises(ValueError, match="it has 0 pictures of 4 tokens, and 4 tokens"):
        processor.entries_of(tokens, [[]])
    split = torch.tensor([[5, 55, 55, 7, 55, 55]])
    with pytest.raises(ValueError, match="other tokens among the 4 of a picture from token 1 on"):
        processor.entries_of(split, [[one]])
    with pytest.raises(ValueError, match="the picture from token 3 on crosses the end of a document"):
        processor.entries_of(tokens, [[one]], torch.tensor([[5, 5]]))
    assert processor.entries_of(tokens, [[one]], torch.tensor([[3, 7]]))["vision_rows"].max() == 3


def test_a_video_is_refused() -> None:
    with pytest.raises(ValueError, match="sees single pictures, and got a video of 2 frames"):
        VisionProcessor(SMALL).prepare(torch.zeros(2, 8, 8, 3, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads=3 does not divide hidden_size=8"),
        ({"image_size": 26}, "patch_size=4 does not divide image_size=26"),
        ({"tokens_per_image": 5}, "tokens_per_image=5 is not a square number"),
        ({"tokens_per_image": 16}, "4 rows of tokens, which do not divide the 6 rows of patches"),
    ],
)
def test_a_tower_whose_parts_do_not_fit_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        VisionConfig(**{**SMALL.model_dump(), **change})


CROPS = PanAndScan(min_ratio=1.3, min_crop_size=9, max_crops=3)
OPTIONS = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": CROPS.min_crop_size,
    "pan_and_scan_max_num_crops": CROPS.max_crops,
    "pan_and_scan_min_ratio_to_activate": CROPS.min_ratio,
}
PIECE, TEXTS = r"\n\n|[^\n]", (BEFORE, BEHIND, ACROSS, "ab")


def librarys() -> tuple[Any, Any]:
    """The library's processor, and its tokenizer: a token for a letter or a blank line."""
    from transformers import PreTrainedTokenizerFast
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    tokenizers = pytest.importorskip("tokenizers")
    marks = {"<image>": 55, "<start>": 56, "<end>": 57, "\n\n": 58}
    letters = sorted({letter for text in TEXTS for letter in text if letter != "\n"})
    words = {**marks, **{letter: number for number, letter in enumerate(letters)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PIECE), "isolated")
    names = {"boi_token": "<start>", "image_token": "<image>", "eoi_token": "<end>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, extra_special_tokens=names)
    size = {"height": SMALL.image_size, "width": SMALL.image_size}
    made = library.Gemma3ImageProcessorPil(size=size)
    return Gemma3Processor(made, tokenizer, image_seq_length=SMALL.tokens_per_image), tokenizer


def test_crops_and_the_tokens_around_them_are_those_of_the_library() -> None:
    processor, (theirs, tokenizer) = VisionProcessor(SMALL.model_copy(update={"pan_and_scan": CROPS})), librarys()
    numbers = set()
    for number in range(200):
        data = coded_picture(number, MODES[number % len(MODES)])
        picture = images.load_image(Image.open(io.BytesIO(data)))
        expected = theirs(text="a<start>b", images=[picture], return_tensors="pt", **OPTIONS)
        medium = processor.prepare(decode_picture(data)).written(
            lambda text: tokenizer.encode(text, add_special_tokens=False)
        )
        ends = [tokenizer.convert_tokens_to_ids(letter) for letter in "ab"]
        assert [ends[0], *medium.tokens, ends[1]] == expected["input_ids"][0].tolist()
        side = SMALL.patch_size
        pixels = torch.nn.functional.unfold(expected["pixel_values"], side, stride=side).mT.flatten(0, 1)
        assert medium.rows == len(pixels)
        assert (medium.values - pixels).abs().max() < 1e-5
        numbers.add(medium.rows // SMALL.num_patches)
    assert numbers == {1, 3, 4}


def test_each_crop_is_a_picture_of_its_own_in_the_tower_and_in_the_text() -> None:
    processor = VisionProcessor(SMALL.model_copy(update={"pan_and_scan": CROPS}))
    medium = processor.prepare(torch.zeros(1, 12, 24, 3, dtype=torch.uint8)).written(lambda text: [len(text)])
    picture = (56, 55, 55, 55, 55, 57)
    assert medium.tokens == (len(BEFORE), *picture, len(BEHIND), *picture, len(ACROSS), *picture, 58)
    entries = processor.entries_of(torch.tensor([medium.tokens]), [[medium]])
    assert entries["patch_lengths"].tolist() == [[36, 36, 36]]
    assert entries["vision_rows"].max() == 11
    assert entries["position_groups"][0][[1, 2, 10, 18]].tolist() == [-1, 0, 1, 2]
    with pytest.raises(ValueError, match="vision: pan_and_scan needs blank_line_token"):
        VisionConfig(pan_and_scan=CROPS, blank_line_token=None)


def test_pictures_are_restored_from_the_entries_of_a_micro_batch() -> None:
    processor = VisionProcessor(SMALL.model_copy(update={"pan_and_scan": CROPS, "pixel_std": (0.2, 0.3, 0.4)}))
    long = torch.from_numpy(np.random.default_rng(5).integers(0, 256, (1, 12, 24, 3), dtype=np.uint8))
    contents = [decode_picture(coded_picture(number, "RGB")) for number in (2, 3)]
    media = [processor.prepare(one).written(lambda _: [1]) for one in (contents[0], long, contents[1])]
    rows = [[*media[0].tokens, *media[1].tokens], [1, *media[2].tokens]]
    length = max(map(len, rows))
    tokens = torch.tensor([row + [2] * (length - len(row)) for row in rows])
    entries = processor.entries_of(tokens, [media[:2], media[2:]])
    seen = processor.contents_of({"tokens": tokens, **entries})
    crops = [crop for one in (contents[0], long) for crop in (one, *crops_of(one, processor.vision))]
    expected = [crops, [contents[1], *crops_of(contents[1], processor.vision)]]
    assert len(crops) >= 4
    for own, wanted, row in zip(seen, expected, tokens, strict=True):
        assert len(own) == len(wanted)
        for one, content in zip(own, wanted, strict=True):
            side = SMALL.image_size
            assert torch.equal(one.content, resize_frames(content, side, side, "bilinear"))
            assert row[list(one.positions)].tolist() == [55] * SMALL.tokens_per_image
