"""Tiny models that see, of the transformers library and of this family, and micro batches with images for both."""

import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from beside_library import Seen, Tensors, distances_from, seeing_library
from library_models import drawn, in_one_process, wide
from mplug_qwen_vl import QwenVL
from mplug_qwen_vl.build import build
from mplug_qwen_vl.config import QwenVLConfig
from mplug_qwen_vl.stream import Document, Grid, micro_batch_entries, read_document
from mplug_qwen_vl.vision import VisionConfig
from torch import Tensor

from mplug.tensors.random import sample_keys
from mplug_nn import form_of

IMAGE, VIDEO, START, END = 55, 56, 57, 58
V = 61
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
TEXT: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_theta": 1e4,
}
TOWER: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 24,
    "num_heads": 2,
    "intermediate_size": 20,
    "patch_size": 2,
    "out_hidden_size": 32,
}
SECOND: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    **IDS,
    "text_config": {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
    "vision_config": {**TOWER, "window_size": 8, "fullatt_block_indexes": [1, 3], "tokens_per_second": 3},
}
DENSE: dict[str, Any] = {
    "model_type": "qwen3_vl",
    **IDS,
    "text_config": {
        **TEXT,
        "head_dim": 16,
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    },
    "vision_config": {**TOWER, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]},
}
SPARSE: dict[str, Any] = {
    **DENSE,
    "model_type": "qwen3_vl_moe",
    "text_config": {
        **DENSE["text_config"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "mlp_only_layers": [1],
    },
}
CONFIGS = {"2.5": SECOND, "3": DENSE, "3-moe": SPARSE}
SILENT = dict.fromkeys(("aux_loss_coefficient", "z_loss_coefficient"), 0.0)
"""The library adds no balancing loss by default."""


class Sample(NamedTuple):
    """Tokens, their kinds as the library numbers them, and the grids of images and videos in order of occurrence."""

    tokens: list[int]
    kinds: list[int]
    images: list[Grid]
    videos: list[Grid]
    grids: list[Grid]


def sample(parts: Sequence[int | Grid], length: int, seed: int, *, frames_apart: bool, merge: int = 2) -> Sample:
    """A sample of text and images: a number is that of text tokens, a grid an image, or a video if it has frames."""
    generator = torch.Generator().manual_seed(seed)
    tokens, kinds = list[int](), list[int]()

    def add(found: list[int], kind: int) -> None:
        tokens.extend(found)
        kinds.extend([kind] * len(found))

    def text(count: int) -> None:
        add(torch.randint(50, (count,), generator=generator).tolist(), 0)

    def see(token: int, count: int, kind: int) -> None:
        add([START], 0)
        add([token] * count, kind)
        add([END], 0)

    for part in parts:
        if isinstance(part, int):
            text(part)
        elif part.frames == 1:
            see(IMAGE, part.num_patches // merge**2, 1)
        elif frames_apart:
            for _ in range(part.frames):
                text(2)
                see(VIDEO, part.rows * part.columns // merge**2, 2)
        else:
            see(VIDEO, part.num_patches // merge**2, 2)
    text(length - len(tokens))
    grids = [part for part in parts if not isinstance(part, int)]
    images = [grid for grid in grids if grid.frames == 1]
    return Sample(tokens, kinds, images, [grid for grid in grids if grid.frames > 1], grids)


def micro_batch(samples: Sequence[Sample], config: QwenVLConfig, multiple: int = 1) -> Seen:
    """The micro batch of samples, with random patches."""
    vision = config.vision
    assert vision is not None
    generator = torch.Generator().manual_seed(11)
    pixels = [
        [
            torch.randn(grid.num_patches, vision.patch_width, generator=generator, dtype=torch.float64)
            for grid in one.grids
        ]
        for one in samples
    ]
    documents: list[list[Document]] = [[read_document(one.tokens, one.grids, vision)] for one in samples]
    length = len(samples[0].tokens)
    tokens = torch.tensor([one.tokens for one in samples])
    labels = tokens.roll(-1, dims=1)
    labels[:, -1], labels[labels >= 50] = -100, -100
    ids = torch.arange(len(samples))
    ours = {
        "tokens": tokens,
        "labels": labels,
        "positions": torch.arange(length)[None],
        "sample_ids": ids,
        "keys": sample_keys(1, 1, ids),
        **micro_batch_entries(documents, length, vision, [x for row in pixels for x in row], multiple),
    }
    theirs: dict[str, Any] = {
        "input_ids": tokens,
        "mm_token_type_ids": torch.tensor([one.kinds for one in samples]),
        "use_cache": False,
    }
    for kind, name, grid_name in (
        ("images", "pixel_values", "image_grid_thw"),
        ("videos", "pixel_values_videos", "video_grid_thw"),
    ):
        pairs = [
            (grid, x)
            for one, row in zip(samples, pixels, strict=True)
            for grid, x in zip(one.grids, row, strict=True)
            if grid in getattr(one, kind)
        ]
        if pairs:
            theirs[grid_name] = torch.tensor([grid[:3] for grid, _ in pairs])
            theirs[name] = torch.cat([x for _, x in pairs])
    seconds = [grid.seconds for one in samples for grid in one.videos]
    if seconds and config.vision is not None and config.vision.tokens_per_second is not None:
        theirs["second_per_grid_ts"] = torch.tensor(seconds)
    return Seen(ours, theirs)


def library_positions(model: Any, vision: VisionConfig, found: Sample) -> Tensor:
    """[S, 3] by the library's method, which uses nothing of its model but the config."""
    config = SimpleNamespace(
        vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=vision.tokens_per_second)
    )
    own = SimpleNamespace(config=config, get_vision_position_ids=partial(model.get_vision_position_ids, None))
    grids = {
        "image_grid_thw": torch.tensor([grid[:3] for grid in found.images]) if found.images else None,
        "video_grid_thw": torch.tensor([grid[:3] for grid in found.videos]) if found.videos else None,
        "second_per_grid_ts": [grid.seconds for grid in found.videos] or None,
    }
    positions, _ = model.get_rope_index(own, torch.tensor([found.tokens]), torch.tensor([found.kinds]), **grids)
    return positions[:, 0].T


def library_in_fp64(given: Mapping[str, Any]) -> Any:
    """The context in which the library's modules of a `model_type` compute in fp64."""
    kind = given["model_type"]
    importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    return wide(kind)


def config_of(given: Mapping[str, Any], **further: Any) -> QwenVLConfig:
    """Our config of a config.json."""
    found = form_of(QwenVL.public_forms, given).read(given)
    return QwenVLConfig(**{**found.altering, **found.free, **SILENT, **found.fixed, **further})


def public(given: Mapping[str, Any], library: Tensors) -> Tensors:
    """The library's tensors by their names on disk, as its conversion mapping (5.23) states them."""
    found = {}
    for name, tensor in library.items():
        if given["model_type"] == "qwen2_5_vl":
            name = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        found[name] = tensor.mT if ".mlp.experts." in name else tensor
    return found


def distances(
    given: Mapping[str, Any], samples: Sequence[Sample], multiple: int = 1, **further: Any
) -> dict[str, float]:
    """The distances from the library for samples, in fp64."""
    config = config_of(given, **further)
    model = in_one_process(lambda: build(config, has_images=True))
    seen = micro_batch(samples, config, multiple)
    with library_in_fp64(given):
        library = drawn(seeing_library(given, experts_implementation="eager"))

        def is_unused(name: str, gradient: Tensor | None, expected: Tensor) -> bool:
            """The tower saw padding alone."""
            if gradient is None or expected.any() or all(x.grad is not None for x in library.parameters()):
                return False
            assert not gradient.any(), name
            return True

        return distances_from(library, seen.theirs, model, seen.ours, partial(public, given), is_unused)
