"""The entries of images are those that the transformers library computes from tokens and grids."""

import random

import pytest
import torch
from mplug_qwen_vl.stream import Grid, micro_batch_entries, read_document, tower_order
from mplug_qwen_vl.vision import VisionConfig

transformers = pytest.importorskip("transformers")

from seeing_models import IMAGE, VIDEO, Sample, library_positions, sample  # noqa: E402
from transformers import vision_utils  # noqa: E402
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as second  # noqa: E402
from transformers.models.qwen3_vl import modeling_qwen3_vl as third  # noqa: E402

MARKS = {"image_token": IMAGE, "video_token": VIDEO, "start_token": 57, "end_token": 58}
TIMED = VisionConfig(
    window_size=112, patch_size=14, full_attention_blocks=(7,), tokens_per_second=2, deepstack_blocks=(), **MARKS
)
APART = VisionConfig(**MARKS)
CASES = {"2.5": (TIMED, second.Qwen2_5_VLModel), "3": (APART, third.Qwen3VLModel)}
LENGTH = 700


def drawn(seed: int, *, frames_apart: bool) -> Sample:
    """A random sample with up to five images and videos."""
    draw = random.Random(seed)
    parts: list[int | Grid] = []
    for _ in range(draw.randint(1, 5)):
        frames = draw.choice((1, 1, 1, draw.randint(2, 4)))
        parts += [
            draw.randint(0, 9),
            Grid(frames, 2 * draw.randint(1, 9), 2 * draw.randint(1, 9), draw.choice((0.5, 1.0, 1.7))),
        ]
    return sample(parts, LENGTH, seed, frames_apart=frames_apart)


def fits(found: Sample) -> bool:
    return len(found.tokens) == LENGTH


@pytest.mark.parametrize("kind", CASES)
def test_coordinates_are_those_of_the_library(kind: str) -> None:
    vision, model = CASES[kind]
    seen = 0
    for seed in range(60):
        found = drawn(seed, frames_apart=kind == "3")
        if not fits(found):
            continue
        seen += len(found.grids)
        document = read_document(found.tokens, found.grids, vision)
        assert torch.equal(document.coordinates, library_positions(model, vision, found)), seed
    assert seen > 60


@pytest.mark.parametrize("kind", CASES)
def test_patches_and_windows_are_in_the_librarys_order(kind: str) -> None:
    """Patches, their places, the lengths of frames and windows, and the row that stands in place of each token."""
    vision, _ = CASES[kind]
    for seed in range(20):
        found = drawn(seed, frames_apart=kind == "3")
        if not fits(found):
            continue
        document = read_document(found.tokens, found.grids, vision)
        table = torch.tensor([grid[:3] for grid in found.grids])
        number = torch.arange(sum(grid.num_patches for grid in found.grids), dtype=torch.float64)
        patches = [
            x[:, None].expand(-1, vision.patch_width) for x in number.split([g.num_patches for g in found.grids])
        ]
        entries = micro_batch_entries([[document]], LENGTH, vision, patches)
        order = entries["patches"][0, :, 0].to(torch.int64)
        places = vision_utils.get_vision_position_ids(table, 2)
        assert torch.equal(entries["patch_places"][0, :, :2], places[order])
        starts = vision_utils.get_vision_cu_seqlens(table)
        assert torch.equal(entries["patch_lengths"][0], starts.diff().to(torch.int64))
        rows = entries["vision_rows"][0]
        assert torch.equal(rows >= 0, torch.tensor(found.kinds) > 0)
        seen = order.view(-1, 4)[rows[rows >= 0]]
        assert torch.equal(seen.flatten(), number.to(torch.int64)), "each token sees the square of its place"
        if vision.window_size is not None:
            index, borders = vision_utils.get_vision_window_index(table, 2, vision.window_size, vision.patch_size)
            assert torch.equal(order.view(-1, 4)[:, 0] // 4, index)
            assert torch.equal(entries["window_lengths"][0], borders.diff().to(torch.int64))


def test_documents_of_a_sample_see_their_own_images_and_padding_is_seen_by_none() -> None:
    grids = [Grid(1, 4, 4), Grid(1, 2, 6), Grid(1, 2, 2)]
    texts = [sample((2, grid), 12, 1, frames_apart=True) for grid in grids]
    documents = [read_document(one.tokens, one.grids, APART) for one in texts]
    patches = [torch.randn(grid.num_patches, APART.patch_width) for grid in grids]
    entries = micro_batch_entries([documents[:2], documents[2:]], 30, APART, patches, multiple=6)
    rows, places = entries["vision_rows"], entries["coordinates"]
    assert rows[0][rows[0] >= 0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert rows[1][rows[1] >= 0].tolist() == [7]
    assert places[0, 12].tolist() == [0, 0, 0], "coordinates restart with each document"
    assert entries["patches"].shape[1] == 4 * 12
    assert entries["patch_lengths"].tolist() == [[16, 12, 4, 16]]
    assert not entries["patches"][0, 32:].any()


@pytest.mark.parametrize("multiple", [1, 8])
def test_a_micro_batch_without_an_image_has_padding_alone(multiple: int) -> None:
    document = read_document([1, 2, 3], [], TIMED)
    entries = micro_batch_entries([[document], []], 5, TIMED, [], multiple)
    assert entries["patches"].shape == (1, 4 * multiple, TIMED.patch_width)
    assert entries["patch_lengths"].sum() == entries["window_lengths"].sum() == 4 * multiple
    assert (entries["vision_rows"] == -1).all()


REFUSED = {
    "an image too many": (
        ([1, IMAGE], [Grid(1, 2, 2)] * 2),
        "there are 2 images and videos, and the text has tokens for",
    ),
    "an image too few": (([IMAGE, 1, IMAGE], [Grid(1, 2, 2)]), "token 2 stands for an image or a video"),
    "a cut image": (([1, IMAGE, IMAGE], [Grid(1, 4, 4)]), "1 x 4 x 4 patches has 4 tokens, but the text has others"),
    "an interrupted image": (([IMAGE, 1, IMAGE], [Grid(1, 2, 4)]), "has others among the 2 from token 0 on"),
    "an odd grid": (([IMAGE], [Grid(1, 3, 2)]), "3 x 2 patches cannot be divided into squares of 2 x 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tokens_that_do_not_fit_the_grids_are_refused(case: str) -> None:
    (tokens, grids), sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        read_document(tokens, grids, APART)


def test_without_windows_the_order_is_the_published_one() -> None:
    assert torch.equal(tower_order(Grid(2, 6, 4), APART), torch.arange(48))
    assert not torch.equal(tower_order(Grid(1, 20, 20), TIMED), torch.arange(400))
