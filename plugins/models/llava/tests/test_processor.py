"""Patches are those of the library's processor, from pictures of many sizes; what does not fit is refused."""

import numpy as np
import pytest
import torch
from mplug_llava.config import LlavaConfig
from mplug_llava.processor import PictureProcessor
from mplug_llava.published_towers import SIGLIP_PREPARATION
from mplug_llava.squares import cut
from mplug_llava.vision import VisionConfig

from mplug.registry.bind_section import bind
from mplug_nn.pictures import resize_frames

Image = pytest.importorskip("PIL.Image")
clip = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
siglip = pytest.importorskip("transformers.models.siglip.image_processing_pil_siglip")
NUMBER = 200
TOKEN = 7


def processor(**vision: object) -> PictureProcessor:
    values = {"decoder": {"name": "llama"}, "vision": vision, "image_token": TOKEN}
    config, problems = bind(LlavaConfig, values)
    assert not problems
    return PictureProcessor(config)


def picture(number: int) -> np.ndarray:
    drawn = np.random.default_rng(number)
    height, width = (int(size) for size in drawn.integers(4, 90, 2))
    coarse = drawn.integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return np.array(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


SIDE = 28
SQUARE = {"height": SIDE, "width": SIDE}


@pytest.mark.parametrize("tower", ["clip", "siglip"])
def test_patches_are_those_of_the_library(tower: str) -> None:
    if tower == "clip":
        theirs = clip.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=SQUARE)
        ours = processor(image_size=SIDE, patch_size=7)
    else:
        theirs = siglip.SiglipImageProcessorPil(size=SQUARE, resample=Image.Resampling.BICUBIC)
        ours = processor(image_size=SIDE, patch_size=7, **SIGLIP_PREPARATION, class_row=False)
    for number in range(NUMBER):
        pixels = picture(number)
        expected = theirs(Image.fromarray(pixels), return_tensors="pt")["pixel_values"][0]
        medium = ours.prepare(torch.from_numpy(pixels)[None])
        assert medium.tokens == (TOKEN,) * 16
        assert medium.rows == len(medium.values) == ours.vision.num_rows
        assert not ours.vision.class_row or not medium.values[0].any()
        assert (medium.values - cut(expected.permute(1, 2, 0), ours.vision)).abs().max() < 1e-5, number


def test_rows_of_pictures_stand_in_the_places_of_their_tokens() -> None:
    ours = processor(image_size=8, patch_size=4)
    media = [ours.prepare(torch.from_numpy(picture(number))[None]) for number in range(3)]
    text = [[1, *media[0].tokens, 2, *media[1].tokens], [3, 4, *media[2].tokens, 5, 6, 1, 2]]
    entries = ours.entries_of(torch.tensor(text), [media[:2], media[2:]])
    assert set(entries) == set(ours.entries)
    assert entries["vision_rows"].tolist() == [
        [-1, 1, 2, 3, 4, -1, 6, 7, 8, 9],
        [-1, -1, 11, 12, 13, 14, -1, -1, -1, -1],
    ]
    assert entries["patch_places"].tolist() == [[0, 1, 2, 3, 4] * 3]
    assert entries["patch_lengths"].tolist() == [[5, 5, 5]]
    assert torch.equal(entries["patches"][0], torch.cat([medium.values for medium in media]))


def test_the_class_row_may_stand_in_the_text_too() -> None:
    ours = processor(image_size=8, patch_size=4, features="all")
    medium = ours.prepare(torch.from_numpy(picture(1))[None])
    assert len(medium.tokens) == medium.rows == 5
    assert ours.entries_of(torch.tensor([medium.tokens]), [[medium]])["vision_rows"].tolist() == [[0, 1, 2, 3, 4]]


def test_a_micro_batch_without_a_picture_has_one_row_that_no_token_refers_to() -> None:
    ours = processor(image_size=8, patch_size=4)
    entries = ours.entries_of(torch.zeros(2, 3, dtype=torch.int64), [[], []])
    assert {name: tuple(entries[name].shape) for name in ("patches", "patch_places", "patch_lengths")} == {
        "patches": (1, 1, 48),
        "patch_places": (1, 1),
        "patch_lengths": (1, 1),
    }
    assert entries["vision_rows"].tolist() == [[-1] * 3] * 2


def test_what_does_not_fit_is_refused() -> None:
    ours = processor(image_size=8, patch_size=4)
    medium = ours.prepare(torch.from_numpy(picture(1))[None])
    with pytest.raises(ValueError, match=r"sample 1 .*: its 1 pictures have 4 tokens, and the text has 3 tokens 7"):
        ours.entries_of(torch.tensor([[1, 1, 1], [7, 7, 7]]), [[], [medium]])
    with pytest.raises(ValueError, match="1 x 201 pixels is more than 200 times as long as it is wide"):
        ours.prepare(torch.zeros(1, 201, 1, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="a video of 2 frames is none"):
        ours.prepare(torch.zeros(2, 8, 8, 3, dtype=torch.uint8))


def test_pixels_beyond_the_last_whole_patch_are_not_seen() -> None:
    vision = VisionConfig(image_size=8, patch_size=3, features="all")
    assert cut(torch.ones(8, 8, 3), vision).shape == (5, 27)


@pytest.mark.parametrize("features", ["patches", "all"])
def test_pictures_are_restored_from_the_entries_of_a_micro_batch(features: str) -> None:
    ours = processor(image_size=8, patch_size=4, features=features, fit="stretch", pixel_std=(0.2, 0.3, 0.4))
    contents = [torch.from_numpy(picture(number))[None] for number in range(3)]
    media = [ours.prepare(content) for content in contents]
    text = [[*media[0].tokens, *media[1].tokens, 2], [3, *media[2].tokens, *[5] * len(media[0].tokens)]]
    tokens = torch.tensor(text)
    seen = ours.contents_of({"tokens": tokens, **ours.entries_of(tokens, [media[:2], media[2:]])})
    assert [len(own) for own in seen] == [2, 1]
    for one, content in zip([one for own in seen for one in own], contents, strict=True):
        assert torch.equal(one.content, resize_frames(content, 8, 8))
    assert [one.positions[0] for one in seen[0]] == [0, len(media[0].tokens)]
