"""The mock of images: samples are functions of the seed and their numbers, whatever the micro batches."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mplug import UsageError
from mplug_testing.harness import tiny_run

S = 48
SEEING: dict[str, Any] = {
    "model.name": "qwen-vl",
    "model.preset": "tiny",
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.rope_sections": [2, 1, 1],
    "model.num_kv_heads": 2,
    "model.vocab_size": 512,
    "model.vision.patch_size": 2,
    "data.name": "qwen-vl-mock",
    "data.longest": 2,
    "data.frames": 2,
    "trainer.seq_length": S,
}
MARKS = (500, 501, 503, 504)


def samples(size: int, **settings: Any) -> Iterator[dict[str, Tensor]]:
    """The first 48 samples, read in micro batches of `size`: tokens, labels, coordinates, and the patches they see."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    run = tiny_run({**SEEING, **named, "trainer.micro_batch_size": size})
    for batch in run.hooks.call.build_loader(run=run, split="train").take(48):
        squares = batch["patches"][0].unflatten(0, (-1, 4))
        assert batch["patch_lengths"].sum() == batch["patches"].shape[1] == batch["patch_places"].shape[1]
        for row, seen in enumerate(batch["vision_rows"]):
            own = {name: batch[name][row] for name in ("tokens", "labels", "coordinates")}
            yield {**own, "seen": seen >= 0, "patches": squares[seen[seen >= 0]]}


@pytest.mark.parametrize("settings", [{}, {"data__documents": 3, "data__multiple": 5}], ids=["one text", "packed"])
def test_samples_do_not_depend_on_micro_batches(settings: dict[str, Any]) -> None:
    alone, together = list(samples(1, **settings)), list(samples(4, **settings))
    assert len(alone) == len(together) == 48
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    counts = {int(one["seen"].sum()) for one in alone}
    assert 0 in counts
    assert len(counts) > 3
    others = list(samples(1, trainer__seed=5, **settings))
    assert not torch.equal(others[0]["tokens"], alone[0]["tokens"])


def test_labels_are_the_next_tokens_except_those_of_images() -> None:
    for one in samples(2):
        expected = torch.cat((one["tokens"][1:], torch.tensor([-100])))
        expected[torch.isin(expected, torch.tensor(MARKS))] = -100
        assert torch.equal(one["labels"], expected)
        assert torch.equal(one["seen"], torch.isin(one["tokens"], torch.tensor(MARKS[2:])))


REFUSED = {
    "makes images for models of qwen-vl with a tower": {"model.vision": None},
    "must be less than model.vocab_size=100": {"model.vocab_size": 100},
    "data.documents=5 does not divide trainer.seq_length=48": {"data.documents": 5},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_the_model_cannot_see_is_refused(sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        tiny_run({**SEEING, **REFUSED[sentence]})
    assert sentence in str(refused.value)
