"""The processor of Qwen-VL makes what the library's makes, from files of all modes; what it cannot take is refused."""

import io
from functools import partial
from typing import Any

import pytest
import torch
from coded_pictures import MODES, coded_picture
from mplug_qwen_vl.processor import VisionProcessor, fitted
from mplug_qwen_vl.stream import tower_order
from mplug_qwen_vl.vision import VisionConfig

from mplug_nn.pictures import decode_picture, resize_frames
from mplug_streams import Medium

Image = pytest.importorskip("PIL.Image")
library = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
images = pytest.importorskip("transformers.image_utils")
NUMBER = 200
smooth = partial(coded_picture, smallest=4, is_smooth=True)


@pytest.mark.parametrize(("patch", "mean"), [(14, (0.48, 0.46, 0.41)), (16, (0.5, 0.5, 0.5))])
def test_patches_and_grids_are_those_of_the_library(patch: int, mean: tuple[float, float, float]) -> None:
    bounds = {"shortest_edge": 24 * patch**2, "longest_edge": 100 * patch**2}
    theirs = library.Qwen2VLImageProcessorPil(patch_size=patch, size=bounds, image_mean=mean, image_std=(0.3,) * 3)
    vision = VisionConfig(
        patch_size=patch,
        min_pixels=bounds["shortest_edge"],
        max_pixels=bounds["longest_edge"],
        pixel_mean=mean,
        pixel_std=(0.3,) * 3,
    )
    processor = VisionProcessor(vision)
    for number in range(NUMBER // 2):
        data = smooth(number, MODES[number % len(MODES)])
        expected = theirs(images.load_image(Image.open(io.BytesIO(data))), return_tensors="pt")
        medium = processor.prepare(decode_picture(data))
        grid, patches = medium.values
        assert [list(grid[:3])] == expected["image_grid_thw"].tolist()
        assert medium.rows == len(patches)
        assert medium.tokens.count(vision.image_token) == len(patches) // 4
        assert (patches - expected["pixel_values"]).abs().max() < 1e-5


def test_entries_refer_to_the_patches_of_each_picture() -> None:
    vision = VisionConfig(patch_size=4, min_pixels=64, max_pixels=1600, deepstack_blocks=())
    processor = VisionProcessor(vision)
    drawn = [processor.prepare(decode_picture(smooth(number, "RGB"))) for number in range(3)]
    text = [[7, *drawn[0].tokens, 8, *drawn[1].tokens], [9, *drawn[2].tokens]]
    length = max(map(len, text))
    tokens = torch.tensor([row + [1] * (length - len(row)) for row in text])
    entries = processor.entries_of(tokens, [drawn[:2], drawn[2:]])
    assert set(entries) == set(processor.entries)
    seen = torch.isin(tokens, torch.tensor([*processor.placeholders]))
    assert torch.equal(entries["vision_rows"] >= 0, seen)
    expected = torch.cat([medium.values[1][tower_order(medium.values[0], vision)] for medium in drawn])
    assert torch.equal(entries["patches"][0], expected)
    assert entries["patch_lengths"].tolist() == [[medium.rows for medium in drawn]]


def test_a_micro_batch_without_a_picture_has_one_square_that_nothing_refers_to() -> None:
    vision = VisionConfig(patch_size=4)
    entries = VisionProcessor(vision).entries_of(torch.arange(6)[None], [[]])
    assert entries["patches"].shape == (1, 4, vision.patch_width)
    assert entries["vision_rows"].tolist() == [[-1] * 6]


def pictures(*numbers: int) -> Any:
    processor = VisionProcessor(VisionConfig(patch_size=4, min_pixels=64, max_pixels=1600))
    return processor, [processor.prepare(decode_picture(smooth(number, "RGB"))) for number in numbers]


def test_placeholders_and_pictures_that_do_not_fit_are_refused() -> None:
    processor, (one, two) = pictures(1, 2)
    tokens = torch.tensor([[5, *one.tokens, 6]])
    with pytest.raises(ValueError, match="sample 0 of the micro batch: it has 2 pictures and videos, and tokens of 1"):
        processor.entries_of(tokens, [[one, two]])
    with pytest.raises(ValueError, match="sample 0 of the micro batch: token 2 stands for an image"):
        processor.entries_of(tokens, [[]])
    smaller = Medium(one.tokens[:-2] + one.tokens[-1:], one.rows, one.values)
    with pytest.raises(ValueError, match="sample 0 of the micro batch"):
        processor.entries_of(torch.tensor([[5, *smaller.tokens, 6]]), [[one]])


def test_pictures_that_cannot_be_taken_are_refused() -> None:
    processor, _ = pictures()
    with pytest.raises(ValueError, match="1 x 201 pixels is more than 200 times as long as it is wide"):
        processor.prepare(torch.zeros(1, 201, 1, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="a picture has one frame, and this content has 2"):
        processor.prepare(torch.zeros(2, 8, 8, 3, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"not a picture", "the bytes are no picture in a format that Pillow reads"),
        (smooth(1, "RGB")[:-200], "the picture is damaged"),
        (smooth(1, "RGB"), "has more than 9 pixels"),
    ],
)
def test_bytes_that_are_no_sound_picture_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode_picture(data, most_pixels=9 if "more than" in words else 1 << 20)


def test_media_are_restored_from_the_entries_of_a_micro_batch() -> None:
    for window in (None, 16):
        vision = VisionConfig(
            patch_size=4,
            min_pixels=64,
            max_pixels=1600,
            window_size=window,
            tokens_per_second=2,
            pixel_mean=(0.4, 0.5, 0.6),
            pixel_std=(0.2, 0.3, 0.4),
        )
        processor = VisionProcessor(vision)
        contents = [decode_picture(smooth(number, "RGB")) for number in range(3)]
        contents.append(torch.cat([resize_frames(contents[0], 24, 40), resize_frames(contents[1], 24, 40)] * 2))
        media = [processor.prepare(content) for content in contents[:3]]
        media.append(processor.prepare_video(contents[3], 2, list))
        text = [[7, *media[0].tokens, *media[1].tokens], [9] * 5, [9, *media[2].tokens, 8, *media[3].tokens]]
        length = max(map(len, text))
        tokens = torch.tensor([row + [1] * (length - len(row)) for row in text])
        entries = processor.entries_of(tokens, [media[:2], [], media[2:]])
        seen = processor.contents_of({"tokens": tokens, **entries})
        assert [len(own) for own in seen] == [2, 0, 2]
        found = [one for own in seen for one in own]
        for one, medium, content in zip(found, media, contents, strict=True):
            height, width = fitted(content.shape[1], content.shape[2], vision, (64, 1600))
            assert torch.equal(one.content, resize_frames(content, height, width))
            assert len(one.positions) == len(medium.tokens) - 2
        assert {int(tokens[2, position]) for position in seen[2][1].positions} == {vision.video_token}
