"""What a micro batch of conversations has: the colours of its pictures, and the numbers in its questions."""

import re

import pytest
from picture_talks import COLOURS

from mplug import MicroBatch

pytest.importorskip("mplug_qwen_vl")
pytest.importorskip("PIL")


def colours_of(batch: MicroBatch) -> list[str]:
    segments = batch["patches"][0].split([length for length in batch["patch_lengths"][0].tolist() if length])
    channels = [segment.view(len(segment), 3, -1).mean((0, 2)).argmax() for segment in segments]
    return [list(COLOURS)[int(channel)] for channel in channels]


def numbers(batch: MicroBatch, mark: bytes = b":") -> list[int]:
    """The number that the question of each sample begins with; those with another mark behind it are left out."""
    texts = (bytes(token for token in row if token < 256) for row in batch["tokens"].tolist())
    found = (re.match(rb"user\n(\d+)" + mark, text) for text in texts)
    return [int(one[1]) for one in found if one]
