"""Tiny Gemma 3 models that see, of the transformers library and of this family, and micro batches for both."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from beside_library import Seen, distances_from, seeing_library
from library_models import drawn, in_one_process, wide
from mplug_gemma import Gemma
from mplug_gemma.build import build
from mplug_gemma.config import GemmaConfig
from mplug_gemma.stream import micro_batch_entries
from torch import Tensor

from mplug.tensors.random import sample_keys
from mplug_nn import form_of

IMAGE, START, END, V = 55, 56, 57, 61
TEXT: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": V,
    "hidden_size": 16,  # the library keeps its square root in fp32
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "query_pre_attn_scalar": 12,
    "sliding_window": 5,
    "sliding_window_pattern": 3,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
TOWER: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "image_size": 12,
    "patch_size": 2,
    "vision_use_head": False,
}
CONFIG: dict[str, Any] = {
    "model_type": "gemma3",
    "image_token_index": IMAGE,
    "boi_token_index": START,
    "eoi_token_index": END,
    "mm_tokens_per_image": 9,
    "text_config": TEXT,
    "vision_config": TOWER,
}
"""Images of 6 x 6 patches and 3 x 3 tokens: more tokens than a window holds."""


def sample(parts: Sequence[int | str], length: int, seed: int, size: int) -> list[int]:
    """The tokens of text and images: a number is that of text tokens, 'image' an image of `size` tokens.

    'bare' is an image without the tokens around it.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list[int]()

    def text(count: int) -> None:
        tokens.extend(torch.randint(50, (count,), generator=generator).tolist())

    for part in parts:
        if isinstance(part, int):
            text(part)
        else:
            tokens.extend([IMAGE] * size if part == "bare" else [START, *[IMAGE] * size, END])
    text(length - len(tokens))
    return tokens


def micro_batch(samples: Sequence[Sequence[int]], config: GemmaConfig) -> Seen:
    """The micro batch of samples of tokens, with random pixels."""
    vision = config.vision
    assert vision is not None
    tokens = torch.tensor(samples)
    numbers = [sum(token == IMAGE for token in own) // vision.tokens_per_image for own in samples]
    shape = (sum(numbers), vision.channels, vision.image_size, vision.image_size)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    side = vision.patch_size
    patches = pixels.unfold(2, side, side).unfold(3, side, side)  # [N, colour, patch row, patch column, row, column]
    flat = patches.permute(0, 2, 3, 1, 4, 5).reshape(len(pixels), vision.num_patches, vision.patch_width)
    pictures = [list(own) for own in flat.split(numbers)]
    labels = tokens.roll(-1, dims=1)
    labels[:, -1], labels[labels >= 50] = -100, -100
    ids = torch.arange(len(samples))
    ours = {
        "tokens": tokens,
        "labels": labels,
        "positions": torch.arange(tokens.shape[1])[None],
        "sample_ids": ids,
        "keys": sample_keys(1, 1, ids),
        **micro_batch_entries(tokens, pictures, vision),
    }
    kinds = (tokens == IMAGE).to(torch.int64)
    theirs: dict[str, Any] = {"input_ids": tokens, "token_type_ids": kinds, "use_cache": False}
    return Seen(ours, {**theirs, "pixel_values": pixels} if len(pixels) else theirs)


def config_of(given: Mapping[str, Any]) -> GemmaConfig:
    """Our config of a config.json."""
    found = form_of(Gemma.public_forms, given).read(given)
    return GemmaConfig(**{**found.altering, **found.free, **found.fixed})


def public(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The library's tensors by their names in released folders, as its conversion mapping (5.23) states them."""
    places = {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "lm_head.": "language_model.lm_head.",
    }
    found = {}
    for name, tensor in tensors.items():
        (place,) = (one for one in places if name.startswith(one))
        found[places[place] + name.removeprefix(place)] = tensor
    return found


def distances(given: Mapping[str, Any], samples: Sequence[Sequence[int]]) -> dict[str, float]:
    """The distances from the library for samples of tokens, in fp64."""
    config = config_of(given)
    model = in_one_process(lambda: build(config, has_images=True))
    seen = micro_batch(samples, config)
    for name in ("gemma3", "siglip"):  # their modules must exist before `wide`
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")

    def is_unused(name: str, gradient: Tensor | None, _: Tensor) -> bool:
        if not name.startswith("tower.") or "pixel_values" in seen.theirs:
            return False
        assert gradient is not None, name
        assert not gradient.any(), name
        return True

    with wide("gemma3", "siglip"):
        return distances_from(drawn(seeing_library(given)), seen.theirs, model, seen.ours, public, is_unused)
