"""Samples of random tokens and images. B samples, S sequence length."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mplug import MicroBatch
from mplug_qwen_vl.config import QwenVLConfig
from mplug_qwen_vl.stream import Document, Grid, micro_batch_entries, read_document
from mplug_qwen_vl.vision import VisionConfig

IGNORED = -100
"""The label of a position without a target."""


class Amounts(NamedTuple):
    """The fields of the plugin's Config."""

    images: int
    longest: int
    frames: int
    documents: int
    multiple: int


class _Made(NamedTuple):
    """A document with its tokens and labels [S], and the patches of its grids."""

    tokens: Tensor
    labels: Tensor
    document: Document
    patches: list[Tensor]


def reader(seed: int, length: int, model: QwenVLConfig, config: Amounts) -> Callable[[range], MicroBatch]:
    """A function that makes samples of `length` tokens by their numbers.

    In a packed sample, positions restart at 0 in every document, and a document's last token has no target.
    """
    vision, own = model.vision, length // config.documents
    assert vision is not None

    def read(sample_ids: range) -> MicroBatch:
        generator = torch.Generator()
        samples = []
        for number in sample_ids:
            generator.manual_seed(hash((seed, number)))
            samples.append([_document(own, model, vision, config, generator) for _ in range(config.documents)])
        batch: dict[str, Tensor] = {
            "tokens": torch.stack([torch.cat([made.tokens for made in sample]) for sample in samples]),
            "labels": torch.stack([torch.cat([made.labels for made in sample]) for sample in samples]),
            "positions": torch.arange(own).repeat(config.documents)[None],
            "sample_ids": torch.tensor(list(sample_ids)),
        }
        if config.documents > 1:
            batch["document_lengths"] = torch.full((len(samples), config.documents), own)
        documents = [[made.document for made in sample] for sample in samples]
        patches = [x for sample in samples for made in sample for x in made.patches]
        return {**batch, **micro_batch_entries(documents, length, vision, patches, config.multiple)}

    return read


def _document(
    length: int, model: QwenVLConfig, vision: VisionConfig, config: Amounts, generator: torch.Generator
) -> _Made:
    """Text with images at random places; an image that does not fit any more is left out."""

    def number(end: int) -> int:
        return int(torch.randint(end, (), generator=generator))

    marks = (vision.image_token, vision.video_token, vision.start_token, vision.end_token)
    tokens, grids = list[int](), list[Grid]()
    for _ in range(number(config.images + 1)):
        text, frames = number(4), 1 + number(config.frames)
        sides = [vision.merge_size * (1 + number(config.longest)) for _ in range(2)]
        grid = Grid(frames, *sides)
        squares = grid.rows * grid.columns // vision.merge_size**2
        seen = [vision.start_token, *[marks[frames > 1]] * squares, vision.end_token]
        if vision.tokens_per_second is None:
            seen = seen * frames
        else:
            seen[1:-1] = seen[1:-1] * frames
        if len(tokens) + text + len(seen) > length:
            continue
        tokens += _text(text, model, marks, generator) + seen
        grids.append(grid)
    tokens += _text(length - len(tokens), model, marks, generator)
    found = torch.tensor(tokens)
    labels = torch.cat((found[1:], torch.tensor([IGNORED])))
    labels[torch.isin(labels, torch.tensor(marks))] = IGNORED
    patches = [torch.randn(grid.num_patches, vision.patch_width, generator=generator) for grid in grids]
    return _Made(found, labels, read_document(tokens, grids, vision), patches)


def _text(count: int, model: QwenVLConfig, marks: tuple[int, ...], generator: torch.Generator) -> list[int]:
    """Random tokens other than those of images."""
    found = torch.randint(model.vocab_size, (count,), generator=generator)
    return torch.where(torch.isin(found, torch.tensor(marks)), 0, found).tolist()
