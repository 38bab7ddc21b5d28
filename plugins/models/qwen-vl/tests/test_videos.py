"""Videos as lists of frames: grids, patches, tokens and positions are those of the library; the rest is refused."""

import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mplug_qwen_vl.processor import VisionProcessor
from mplug_qwen_vl.stream import Grid, read_document
from mplug_qwen_vl.vision import VisionConfig
from torch import Tensor

Image = pytest.importorskip("PIL.Image")
second = pytest.importorskip("transformers.models.qwen2_5_vl.processing_qwen2_5_vl")
third = pytest.importorskip("transformers.models.qwen3_vl.processing_qwen3_vl")
pictures = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
tokenizers = pytest.importorskip("tokenizers")

from seeing_models import Sample, library_positions  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel  # noqa: E402
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel  # noqa: E402
from transformers.video_utils import VideoMetadata  # noqa: E402

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
MODELS = {"2.5": Qwen2_5_VLModel, "3": Qwen3VLModel}
NUMBER = 40
RATES = (1, 2, 3, 0.7, 24, 29.97, 10)


@pytest.fixture(scope="module")
def library() -> Iterator[Any]:
    """The library's module of videos, which it imports only beside torchvision; resizing alone needs torchvision."""
    name = "transformers.models.qwen3_vl.video_processing_qwen3_vl"
    spec = importlib.util.spec_from_file_location(name, Path(third.__file__).with_name("video_processing_qwen3_vl.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A tokenizer of bytes with the special tokens of the family."""
    alphabet = {byte: number for number, byte in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(alphabet, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=made)


def config(kind: str, tokenizer: Any) -> VisionConfig:
    start, end, image, video = (tokenizer.convert_tokens_to_ids(text) for text in SPECIAL)
    patch = 14 if kind == "2.5" else 16
    return VisionConfig(
        patch_size=patch,
        deepstack_blocks=(),
        tokens_per_second=2 if kind == "2.5" else None,
        video_min_pixels=6 * (2 * patch) ** 2,
        video_max_pixels=40 * (2 * patch) ** 2,
        pixel_mean=(0.5, 0.4, 0.3),
        pixel_std=(0.2, 0.3, 0.4),
        image_token=image,
        video_token=video,
        start_token=start,
        end_token=end,
    )


def drawn(seed: int) -> Tensor:
    """The frames of a video of a random size: 2 to 9 pictures of coarse noise."""
    generator, draw = np.random.default_rng(seed), random.Random(seed)
    frames, height, width = draw.randint(2, 9), draw.randint(8, 200), draw.randint(8, 200)
    coarse = generator.integers(0, 256, (frames, 5, 5, 3), dtype=np.uint8)
    resized = (Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC) for frame in coarse)
    return torch.stack([torch.from_numpy(np.array(frame)) for frame in resized])


def expected_patches(content: Tensor, vision: VisionConfig, library: Any) -> tuple[list[int], Tensor]:
    """The grid and the patches of the library; Pillow resizes each frame."""
    (frames, height, width), side = content.shape[:3], 2 * vision.patch_size
    least, most = vision.video_bounds
    if vision.tokens_per_second is None:
        size = library.smart_resize(frames, height, width, 2, side, least, most)
    else:
        size = pictures.smart_resize(height, width, side, least, most)
    resized = [Image.fromarray(frame.numpy()).resize(size[::-1], Image.Resampling.BICUBIC) for frame in content]
    colours = torch.stack([torch.from_numpy(np.array(frame)) for frame in resized]).float() / 255
    colours = (colours - torch.tensor(vision.pixel_mean)) / torch.tensor(vision.pixel_std)
    patches, *grid = library.Qwen3VLVideoProcessor.patchify(
        None, colours.permute(0, 3, 1, 2)[None], vision.patch_size, vision.merge_size, vision.patch_frames
    )
    return grid, patches[0]


def expected_tokens(kind: str, grid: list[int], frames: int, rate: float, tokenizer: Any) -> list[int]:
    """The library's tokens for the marks that the chat templates write for a video."""
    kinds = {"2.5": second.Qwen2_5_VLProcessor, "3": third.Qwen3VLProcessor}
    own = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token=SPECIAL[0],
        vision_end_token=SPECIAL[1],
        video_token=SPECIAL[3],
        _calculate_timestamps=lambda *given: third.Qwen3VLProcessor._calculate_timestamps(None, *given),
    )
    metadata = VideoMetadata(frames, fps=rate, frames_indices=list(range(frames)))
    inputs = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata]}
    replacement = kinds[kind].replace_video_token(own, inputs, 0)
    tokens: list[int] = tokenizer.encode(f"{SPECIAL[0]}{replacement}{SPECIAL[1]}")
    return tokens


@pytest.mark.parametrize("kind", ["2.5", "3"])
def test_grids_patches_and_tokens_are_those_of_the_library(kind: str, library: Any, tokenizer: Any) -> None:
    """The whole processors of transformers 5.23, with torchvision, gave the same but for the rounding of colours."""
    vision = config(kind, tokenizer)
    for seed in range(NUMBER):
        content, rate = drawn(seed), RATES[seed % len(RATES)]
        medium = VisionProcessor(vision).prepare_video(content, rate, tokenizer.encode)
        grid, patches = medium.values
        expected_grid, expected = expected_patches(content, vision, library)
        assert list(grid[:3]) == expected_grid, seed
        assert medium.rows == len(patches)
        assert (patches - expected).abs().max() < 1e-5
        assert list(medium.tokens) == expected_tokens(kind, expected_grid, len(content), rate, tokenizer)
        assert grid.seconds == 2 / rate


@pytest.mark.parametrize("kind", ["2.5", "3"])
def test_positions_of_a_video_are_those_of_the_library(kind: str, tokenizer: Any) -> None:
    """Those that the library computes from the tokens of the processor; test_stream.py compares drawn tokens."""
    vision, model = config(kind, tokenizer), MODELS[kind]
    for seed in range(8):
        medium = VisionProcessor(vision).prepare_video(drawn(seed), RATES[seed % len(RATES)], tokenizer.encode)
        tokens = [*tokenizer.encode("see: "), *medium.tokens, *tokenizer.encode("?")]
        grids: list[Grid] = [medium.values[0]]
        found = read_document(tokens, grids, vision).coordinates
        kinds = [2 * (token == vision.video_token) for token in tokens]
        assert torch.equal(found, library_positions(model, vision, Sample(tokens, kinds, [], grids, grids))), seed


def test_entries_of_a_video_with_times_in_the_text(tokenizer: Any) -> None:
    vision = config("3", tokenizer)
    processor = VisionProcessor(vision)
    media = [processor.prepare_video(drawn(number), 2, tokenizer.encode) for number in (3, 4)]
    text = [7, *media[0].tokens, 8, *media[1].tokens]
    entries = processor.entries_of(torch.tensor([text]), [media])
    frames = [grid.rows * grid.columns for grid, _ in (medium.values for medium in media) for _ in range(grid.frames)]
    assert entries["patch_lengths"].tolist() == [frames]
    rows = entries["vision_rows"][0]
    assert rows[rows >= 0].tolist() == list(range(sum(frames) // 4))
    seen = processor.contents_of({"tokens": torch.tensor([text]), **entries})[0]
    assert [len(one.positions) * 4 for one in seen] == frames, "frames with text between them are media of their own"
    assert all(len(one.content) == 2 for one in seen)


@pytest.mark.parametrize(
    ("shape", "words"),
    [((1, 40, 40, 3), "a video of 1 frames is shorter than a patch"), ((2, 6600, 32, 3), "more than 200 times")],
)
def test_videos_that_cannot_be_taken_are_refused(shape: tuple[int, ...], words: str, tokenizer: Any) -> None:
    processor = VisionProcessor(config("3", tokenizer))
    with pytest.raises(ValueError, match=words):
        processor.prepare_video(torch.zeros(shape, dtype=torch.uint8), 2, tokenizer.encode)


def test_a_video_of_one_frame_is_a_video_for_a_model_whose_times_are_positions(tokenizer: Any) -> None:
    vision = config("2.5", tokenizer)
    medium = VisionProcessor(vision).prepare_video(torch.zeros(1, 40, 40, 3, dtype=torch.uint8), 2, tokenizer.encode)
    assert vision.video_token in medium.tokens
    assert medium.values[0].frames == 1
