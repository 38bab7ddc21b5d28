"""Tiles, and the tokens that stand for them, are those of the library's processor, from files of all modes."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from coded_pictures import MODES, coded_picture
from mplug_llava.config import LlavaConfig
from mplug_llava.processor import TileProcessor
from mplug_llava.squares import cut
from mplug_llava.tiles import Tiles
from mplug_llava.tiling import best_resolution, borders, fitted_size
from mplug_llava.vision import CORNERS
from torch.nn import functional as F

from mplug.registry.bind_section import bind
from mplug_nn.pictures import decode_picture, resize_frames
from mplug_streams import Medium

Image = pytest.importorskip("PIL.Image")
pictures = pytest.importorskip("transformers.models.llava_onevision.image_processing_pil_llava_onevision")
texts = pytest.importorskip("transformers.models.llava_onevision.processing_llava_onevision")
images = pytest.importorskip("transformers.image_utils")
tokenizers = pytest.importorskip("tokenizers")
SIDE, IMAGE, VIDEO = 12, 7, 8
RESOLUTIONS = [[12, 12], [12, 36], [24, 24], [36, 12], [24, 36]]
MEAN, STD = (0.5, 0.4, 0.3), (0.5, 0.3, 0.2)


def processor(**tiling: Any) -> TileProcessor:
    """A processor of squares of 4 x 4 patches."""
    values = {
        "decoder": {"name": "llama"},
        "image_token": IMAGE,
        "vision": {
            "image_size": SIDE,
            "patch_size": 3,
            "fit": "stretch",
            "class_row": False,
            "pixel_mean": MEAN,
            "pixel_std": STD,
        },
        "tiling": {"resolutions": RESOLUTIONS, "max_tiles": 2, "video_token": VIDEO, **tiling},
    }
    config, problems = bind(LlavaConfig, values)
    assert not problems, problems
    return TileProcessor(config)


def librarys() -> Any:
    """The library's processor, and a tokenizer that knows two words."""
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "<image>": IMAGE, "<video>": VIDEO}, "<unk>")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", extra_special_tokens={"image_token": "<image>"}
    )
    square = {"height": SIDE, "width": SIDE}

    class WithoutVideos(texts.LlavaOnevisionProcessor):  # type: ignore[misc, name-defined]
        def check_argument_for_proper_class(self, *_: Any) -> None:
            """The library looks up classes that need torchvision."""

    return WithoutVideos(
        pictures.LlavaOnevisionImageProcessorPil(
            size=square, image_grid_pinpoints=RESOLUTIONS, image_mean=MEAN, image_std=STD
        ),
        tokenizer,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_2",
    )


def test_tiles_and_tokens_are_those_of_the_library() -> None:
    """Samples of one picture and of two: 200 pictures."""
    ours, theirs, read = processor(), librarys(), 0
    while read < 200:
        number = 1 + read % 2
        files = [coded_picture(read + one, MODES[(read + one) % len(MODES)]) for one in range(number)]
        read += number
        loaded = [images.load_image(Image.open(io.BytesIO(data))) for data in files]
        expected = theirs(images=[loaded], text=["a " + "<image> a " * number], return_tensors="pt")
        media = [ours.prepare(decode_picture(data), number) for data in files]
        assert expected["input_ids"][0].tolist() == [1, *(token for one in media for token in (*one.tokens, 1))]
        for medium, squares in zip(media, expected["pixel_values"], strict=True):
            tiles = medium.rows // ours.vision.num_rows
            patches = torch.cat([cut(square, ours.vision) for square in squares[:tiles].permute(0, 2, 3, 1)])
            assert not squares[tiles:].any()
            assert (medium.values.patches - patches).abs().max() < 1e-5, read


def prepared(ours: TileProcessor, content: torch.Tensor, number: int = 1) -> Medium:
    """A picture, one of a number of them, or a video of several frames."""
    return ours.prepare(content, number) if len(content) == 1 else ours.prepare_video(content, 2.0, str.encode)


def combined(tiles: Tiles, rows: torch.Tensor) -> torch.Tensor:
    """The weighted sums of rows [P, E] of the tower, one for each token."""
    return (rows[tiles.cells] * tiles.shares[..., None]).sum(1)


def test_rows_of_a_frame_are_halved_as_torch_interpolates_them() -> None:
    ours = processor()
    medium = prepared(ours, torch.zeros(3, 5, 9, 3, dtype=torch.uint8))
    assert medium.tokens == (VIDEO,) * (3 * 4 + 1)
    rows = torch.randn(medium.rows, 5, dtype=torch.float64)
    frames = rows.view(3, 4, 4, 5).permute(0, 3, 1, 2)
    expected = F.interpolate(frames, size=(2, 2), mode="bilinear").permute(0, 2, 3, 1).reshape(-1, 5)
    found = combined(medium.values, rows)
    assert (found[:-1] - expected).abs().max() < 1e-14
    assert not medium.values.shares[-1].any()


def media_of(ours: TileProcessor, *sizes: Sequence[int]) -> list[Medium]:
    drawn = np.random.default_rng(3)
    contents = [torch.from_numpy(drawn.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
    return [prepared(ours, content, sum(size[0] == 1 for size in sizes)) for content in contents]


def test_tokens_refer_to_the_rows_of_their_own_media() -> None:
    ours = processor()
    samples = [media_of(ours, (1, 24, 23), (2, 9, 9)), [], media_of(ours, (1, 5, 9), (1, 8, 8))]
    length = max(sum(len(one.tokens) for one in own) for own in samples) + 2
    tokens = torch.ones(3, length, dtype=torch.int64)
    for row, own in zip(tokens, samples, strict=True):
        placed = torch.tensor([token for one in own for token in one.tokens], dtype=torch.int64)
        row[1 : 1 + len(placed)] = placed
    entries = ours.entries_of(tokens, samples)
    assert set(entries) == set(ours.entries)
    media = [one for own in samples for one in own]
    assert torch.equal(entries["patches"][0], torch.cat([one.values.patches for one in media]))
    assert entries["patch_lengths"].tolist() == [[16] * sum(one.rows // 16 for one in media)]
    first, seen = 0, entries["vision_rows"][tokens != 1]
    for one in media:
        assert torch.equal(seen[: len(one.tokens)], one.values.cells + first)
        seen, first = seen[len(one.tokens) :], first + one.rows
    assert (entries["vision_rows"][tokens == 1] == -1).all()
    assert not entries["vision_shares"][tokens == 1].any()


def test_a_micro_batch_without_a_picture_has_one_row_that_no_token_refers_to() -> None:
    entries: Mapping[str, torch.Tensor] = processor().entries_of(torch.zeros(2, 3, dtype=torch.int64), [[], []])
    assert {name: tuple(entry.shape) for name, entry in entries.items()} == {
        "patches": (1, 1, 27),
        "patch_places": (1, 1),
        "patch_lengths": (1, 1),
        "vision_rows": (2, 3, CORNERS),
        "vision_shares": (2, 3, CORNERS),
    }
    assert (entries["vision_rows"] == -1).all()


def test_what_does_not_fit_is_refused() -> None:
    ours = processor()
    picture, video = media_of(ours, (1, 12, 12), (2, 9, 9))
    tokens = torch.tensor([[*video.tokens, *picture.tokens]])
    with pytest.raises(
        ValueError, match=f"sample 0 .*: its 1 pictures have 0 tokens, and the text has 9 tokens {VIDEO}"
    ):
        ours.entries_of(tokens, [[picture]])
    with pytest.raises(ValueError, match=r"sample 0 .*: its pictures and videos are in another order"):
        ours.entries_of(tokens, [[picture, video]])
    with pytest.raises(ValueError, match="the 4 x 80 rows of its tiles cannot become 0 x 17"):
        processor(resolutions=[[12, 12 * 20]], max_tiles=1).prepare(torch.zeros(1, 1, 20, 3, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tiling": {"video_token": IMAGE}}, "tiling: video_token=7 must be another token than image_token"),
        ({"tiling": {"resolutions": [[12, 18]]}}, "tiling: resolutions has [12, 18], of which vision.image_size=12 is"),
        ({"tiling": {"resolutions": []}}, "tiling: resolutions needs at least one"),
        ({"vision": {"fit": "crop"}}, "tiling: pictures as a whole are stretched"),
        ({"vision": {"features": "all"}}, "tiling: a class row has no place in a grid of tiles"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], sentence: str) -> None:
    values: dict[str, Any] = {
        "decoder": {"name": "llama"},
        "image_token": IMAGE,
        "vision": {"image_size": SIDE, "patch_size": 3, "fit": "stretch"},
        "tiling": {"resolutions": RESOLUTIONS, "video_token": VIDEO},
    }
    for section, own in changes.items():
        values[section] = {**values[section], **own}
    _, problems = bind(LlavaConfig, values)
    assert [sentence in problem.sentence for problem in problems] == [True], problems


def test_media_are_restored_from_the_entries_of_a_micro_batch() -> None:
    """Of a picture with tiles, the part of its fitted form that whole cells show."""
    ours = processor()
    for sizes in ([(1, 24, 23)], [(1, 9, 40), (2, 9, 9)], [(1, 40, 9)], [(1, 5, 9), (1, 8, 8)], [(1, 24, 36)]):
        contents = [torch.randint(256, (*size, 3), dtype=torch.uint8, generator=torch.Generator()) for size in sizes]
        number = sum(size[0] == 1 for size in sizes)
        media = [prepared(ours, content, number) for content in contents]
        tokens = torch.tensor([[1, *(token for one in media for token in one.tokens), 2]])
        (seen,) = ours.contents_of({"tokens": tokens, **ours.entries_of(tokens, [media])})
        begin = 1
        for one, content, medium in zip(seen, contents, media, strict=True):
            assert one.positions == tuple(range(begin, begin + len(medium.tokens)))
            begin += len(medium.tokens)
            assert torch.equal(one.content, expected_of(content, number))


def test_colours_of_videos_may_be_others_than_those_of_pictures() -> None:
    content = torch.randint(256, (2, 9, 9, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    plain, ours = processor(), processor(video_mean=(0.1, 0.2, 0.3), video_std=(0.5, 0.25, 1.0))
    one, two = (one.prepare_video(content, 2.0, str.encode) for one in (plain, ours))
    colours = resize_frames(content, SIDE, SIDE).float() / 255
    expected = (colours - torch.tensor([0.1, 0.2, 0.3])) / torch.tensor([0.5, 0.25, 1.0])
    assert torch.equal(two.values.patches, torch.cat([cut(frame, ours.vision) for frame in expected]))
    assert not torch.equal(one.values.patches, two.values.patches)
    (seen,) = ours.contents_of({"tokens": (tokens := torch.tensor([two.tokens])), **ours.entries_of(tokens, [[two]])})
    assert torch.equal(seen[0].content, resize_frames(content, SIDE, SIDE))


def expected_of(content: torch.Tensor, number: int) -> torch.Tensor:
    """A video's frames as squares, one of several pictures in its square, and a picture fitted to its resolution."""
    height, width = content.shape[1:3]
    if len(content) > 1:
        return resize_frames(content, SIDE, SIDE)
    if number > 1:
        side = max(height, width)
        square = torch.tensor([127, 102, 76], dtype=torch.uint8).expand(1, side, side, 3).clone()
        top, left = (side - height) // 2, (side - width) // 2
        square[:, top : top + height, left : left + width] = content
        return resize_frames(square, SIDE, SIDE)
    resolution = best_resolution(height, width, RESOLUTIONS)  # type: ignore[arg-type]
    high, wide = fitted_size(height, width, resolution)
    fitted = resize_frames(content, high, wide)[0].permute(2, 0, 1)
    top, left = (resolution[0] - high) // 2, (resolution[1] - wide) // 2
    padded = F.pad(fitted, (left, resolution[1] - wide - left, top, resolution[0] - high - top)).permute(1, 2, 0)
    above, before = (3 * one for one in borders(height, width, resolution[0] // 3, resolution[1] // 3))
    return padded[None, above : resolution[0] - above, before : resolution[1] - before]
