"""A unit is compiled once for all numbers of rows and segments, and computes what it does without a compiler."""

import warnings

import pytest

from mplug_testing import run_workers
from mplug_testing.harness import difference, train_steps

SETTINGS: dict[str, object] = {
    "model.name": "qwen-vl",
    "model.preset": "tiny",
    "model.num_layers": 3,
    "model.vision.min_pixels": 256,
    "model.vision.max_pixels": 4096,
    "data.name": "mock",
    "data.media": 3,
    "data.media_sides": [8, 64],
    "trainer.seq_length": 128,
    "trainer.micro_batch_size": 1,
    "trainer.global_batch_size": 8,
    "trainer.compile": "aot_eager",
}
KINDS = 9
"""Patches, block of the tower, merger, merger of DeepStack, join, addition, embedding, block, head."""


def compiled() -> tuple[int, set[tuple[int, int]], str]:
    """The graphs of a run, the numbers of rows and pictures of its batches, and how it differs from eager units."""
    from mplug.model.model import Model
    from mplug_compile.compilation import compiled_graphs

    warnings.simplefilter("ignore")
    seen, loss = set[tuple[int, int]](), Model.loss

    def counted(model: Model, batch: dict) -> object:  # type: ignore[type-arg]
        seen.add((batch["patches"].shape[1], batch["patch_lengths"].shape[1]))
        return loss(model, batch)

    Model.loss = counted  # type: ignore[method-assign]
    trained = train_steps(SETTINGS)
    return compiled_graphs(), seen, difference([trained], train_steps({**SETTINGS, "trainer.compile": "never"}))


@pytest.mark.wide("compile")
@pytest.mark.filterwarnings("ignore")
def test_a_unit_is_compiled_once_for_all_numbers_of_rows_and_pictures_and_computes_as_without_a_compiler() -> None:
    graphs, seen, differs = run_workers(1, compiled)[0]
    assert len({rows for rows, _ in seen}) > 3
    assert len({pictures for _, pictures in seen}) > 1
    assert graphs == 2 * KINDS, "one for training and one for evaluation"
    assert not differs
