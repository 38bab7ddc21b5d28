"""Logits and all gradients are those of the transformers library, in fp64."""

import pytest

pytest.importorskip("transformers")

from mplug_qwen_vl.stream import Grid
from seeing_models import CONFIGS, Sample, distances, sample

TOLERANCE = 1e-10
LENGTH = 60
PARTS = {
    "images of several sizes": (3, Grid(1, 6, 4), 2, Grid(1, 2, 10), 4),
    "a video between text": (2, Grid(2, 6, 4, 1.5), 5),
    "text alone": (9,),
    "one image at the beginning": (Grid(1, 10, 6), 1),
}


def samples(kind: str, names: list[str]) -> list[Sample]:
    apart = kind != "2.5"
    return [sample(PARTS[name], LENGTH, seed, frames_apart=apart) for seed, name in enumerate(names)]


@pytest.mark.parametrize("kind", CONFIGS)
def test_images_videos_and_text_give_the_librarys_logits_and_gradients(kind: str) -> None:
    found = distances(CONFIGS[kind], samples(kind, list(PARTS)), multiple=7)
    assert max(found.values()) < TOLERANCE, found
