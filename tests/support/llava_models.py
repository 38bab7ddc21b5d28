"""Tiny models of LLaVA, of the transformers library and of this family, and micro batches with pictures for both."""

import importlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from beside_library import Seen, distances_from, seeing_library
from library_models import drawn, in_one_process, wide
from mplug_llava import Llava
from mplug_llava.build import build
from mplug_llava.config import LlavaConfig
from mplug_llava.processor import PictureProcessor, TileProcessor
from mplug_llava.squares import cut
from torch import Tensor

from mplug.registry.bind_section import bind
from mplug.tensors.random import sample_keys
from mplug_nn import form_of
from mplug_streams import Medium

IMAGE, VIDEO, V = 55, 56, 61
SIDE = 8
"""Pixels of a side of a picture."""
TEXT: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
CLIP: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 2,
}


def _llava(text: Mapping[str, Any], vision: Mapping[str, Any] = CLIP, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llava",
        "image_token_index": IMAGE,
        "image_seq_length": 16,
        "text_config": {**TEXT, **text},
        "vision_config": vision,
        **more,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _llava({"model_type": "llama"}),
    "qwen2": _llava({"model_type": "qwen2", "tie_word_embeddings": True}),
    "qwen3": _llava(
        {"model_type": "qwen3", "head_dim": 8},
        {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": True},
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
}


TILED: dict[str, Any] = {
    **_llava({"model_type": "qwen2"}, {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}),
    "model_type": "llava_onevision",
    "video_token_index": VIDEO,
    "image_grid_pinpoints": [[SIDE, SIDE], [SIDE, 3 * SIDE], [2 * SIDE, 2 * SIDE], [3 * SIDE, SIDE]],
    "vision_aspect_ratio": "anyres_max_2",
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
"""LLaVA-OneVision."""
del TILED["image_seq_length"]


def config_of(given: Mapping[str, Any]) -> LlavaConfig:
    """Our config of a config.json."""
    found = form_of(Llava.public_forms, given).read(given)
    config, problems = bind(LlavaConfig, {**found.choices, **found.fixed})
    assert not problems, problems
    return config  # type: ignore[no-any-return]


def micro_batch(config: LlavaConfig, numbers: Sequence[int], length: int = 60) -> Seen:
    """Samples of random text with these numbers of random pictures among it."""
    vision, generator = config.vision, torch.Generator().manual_seed(11)
    processor = PictureProcessor(config)
    tokens = torch.randint(50, (len(numbers), length), generator=generator)
    media, pixels = list[list[Medium]](), list[Tensor]()
    for row, number in zip(tokens, numbers, strict=True):
        media.append([])
        start = 2
        for _ in range(number):
            side = vision.image_size
            picture = torch.randn(side, side, 3, generator=generator, dtype=torch.float64)
            pixels.append(picture.permute(2, 0, 1))
            seen = len(vision.seen_rows)
            media[-1].append(Medium((IMAGE,) * seen, vision.num_rows, cut(picture, vision)))
            row[start : start + seen] = IMAGE
            start += seen + 1
    ours = _entries_of(tokens, processor.entries_of(tokens, media))
    theirs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
    return Seen(ours, {**theirs, "pixel_values": torch.stack(pixels)} if pixels else theirs)


Size = tuple[int, int, int]
"""Frames, height and width of a picture or a video."""


def tiled_micro_batch(config: LlavaConfig, samples: Sequence[Sequence[Size]], length: int) -> Seen:
    """Samples of random text with media of these sizes among it; patches are random. All videos have equal frames."""
    vision, generator = config.vision, torch.Generator().manual_seed(11)
    processor = TileProcessor(config)
    tokens = torch.randint(50, (len(samples), length), generator=generator)
    media = list[list[Medium]]()
    pictures, videos, sizes = list[Tensor](), list[Tensor](), list[tuple[int, int]]()
    for row, own in zip(tokens, samples, strict=True):
        media.append([])
        start, number = 2, sum(size[0] == 1 for size in own)
        for size in own:
            content = torch.zeros(*size, 3, dtype=torch.uint8)
            is_video = size[0] > 1
            medium = (
                processor.prepare_video(content, 2.0, str.encode) if is_video else processor.prepare(content, number)
            )
            squares = torch.randn(
                medium.rows // vision.num_rows,
                vision.image_size,
                vision.image_size,
                3,
                generator=generator,
                dtype=torch.float64,
            )
            patches = torch.cat([cut(square, vision) for square in squares])
            media[-1].append(replace(medium, values=medium.values._replace(patches=patches)))
            (pictures if size[0] == 1 else videos).append(squares.permute(0, 3, 1, 2))
            sizes += [size[1:]] if size[0] == 1 else []
            row[start : start + len(medium.tokens)] = torch.tensor(medium.tokens)
            start += len(medium.tokens) + 1
        assert start < length
    theirs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
    if pictures:
        most = max(map(len, pictures))
        padded = [torch.cat((one, one.new_zeros(most - len(one), *one.shape[1:]))) for one in pictures]
        numbers = [sum(size[0] == 1 for size in own) for own in samples]
        theirs |= {
            "pixel_values": torch.stack(padded),
            "image_sizes": torch.tensor(sizes),
            "batch_num_images": torch.tensor([number for number in numbers if number]),
        }
    if videos:
        theirs["pixel_values_videos"] = torch.stack(videos)
    return Seen(_entries_of(tokens, processor.entries_of(tokens, media)), theirs)


def _entries_of(tokens: Tensor, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All entries of a micro batch; text has the tokens below 50."""
    labels = tokens.roll(-1, dims=1)
    labels[:, -1], labels[labels >= 50] = -100, -100
    ids = torch.arange(len(tokens))
    return {
        "tokens": tokens,
        "labels": labels,
        "positions": torch.arange(tokens.shape[1])[None],
        "sample_ids": ids,
        "keys": sample_keys(1, 1, ids),
        **seen,
    }


def library_of(given: Mapping[str, Any], dtype: torch.dtype = torch.float64) -> Any:
    """The library's model with random weights."""
    return drawn(seeing_library(given)).to(dtype)


@contextmanager
def library_in_fp64(given: Mapping[str, Any]) -> Any:
    """The context in which the library's modules compute in fp64."""
    tower = given["vision_config"]["model_type"].removesuffix("_vision_model")
    kinds = (given["model_type"], tower, given["text_config"]["model_type"])
    for kind in kinds:
        importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    with ExitStack() as stack:
        stack.enter_context(wide(*kinds))
        yield


def public(library: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The library's tensors by their names in released folders."""
    found = {}
    for name, tensor in library.items():
        if name.startswith("lm_head"):
            name = f"language_model.{name}"
        name = name.removeprefix("model.").replace("language_model.", "language_model.model.", 1)
        name = name.replace("language_model.model.lm_head", "language_model.lm_head")
        found[name.replace("vision_tower.", "vision_tower.vision_model.", 1)] = tensor
    return found


def distances(given: Mapping[str, Any], numbers: Sequence[int]) -> dict[str, float]:
    """The distances from the library for samples with these numbers of pictures."""
    return distances_of(given, micro_batch(config_of(given), numbers), is_blind=not any(numbers))


def distances_of(given: Mapping[str, Any], seen: Seen, *, is_blind: bool = False) -> dict[str, float]:
    """The distances from the library for a micro batch, in fp64."""
    config = config_of(given)
    decoder = config.decoder.plugin(config.decoder.config)
    model = in_one_process(lambda: build(config, decoder.build_model(), has_images=True))

    def is_unused(name: str, gradient: Tensor | None, expected: Tensor) -> bool:
        if ".unused." in name:
            assert not expected.any(), name
            assert gradient is None, name
            return True
        if is_blind and name.startswith(("tower.", "join.")):
            assert gradient is not None, name
            assert not gradient.any(), name
            return True
        return False

    with library_in_fp64(given):
        return distances_from(library_of(given), seen.theirs, model, seen.ours, public, is_unused)
