"""Encoders train on one GPU in bf16, eager and compiled, with one and with two micro batches a step.

The reference is the same run in fp32 on the CPU, eager.
"""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gpus import STEPS, Step, trained_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # the compiler's own
]
BATCH = 8
SHAPE: dict[str, Any] = {
    "model.preset": None,
    "model.num_layers": 2,
    "model.hidden_size": 128,
    "model.num_attention_heads": 4,
    "model.ffn_hidden_size": 192,
    "model.vocab_size": 257,
    "model.init_std": 0.06,
}
MASKED = {"data.name": "masked", "data.of": {"name": "text"}, "data.mask_token": 256}
PACKED = {"data.name": "masked", "data.of": {"name": "mock", "documents": 3, "vocab_size": 256}, "data.mask_token": 256}
CLASSES = {"model.labels": ["a", "b", "c"], "data.name": "mock", "data.documents": 3, "data.vocab_size": 3}
MODERN = {"model.name": "modernbert", **SHAPE, "model.window": 8}
CASES: dict[str, dict[str, Any]] = {
    "bert": {"model.name": "bert", **SHAPE, **MASKED},
    "bert packed": {"model.name": "bert", **SHAPE, **PACKED},
    "roberta": {"model.name": "bert", **SHAPE, **MASKED, "model.position_offset": 2},
    "modernbert": {**MODERN, **MASKED},
    "modernbert packed": {**MODERN, **PACKED},
    "sequences": {**MODERN, **CLASSES, "model.head": "sequences", "model.pooling": "mean", "optimizer.lr": 1e-4},
    "tokens": {"model.name": "bert", **SHAPE, **CLASSES, "model.head": "tokens"},
    "embedding": {**MODERN, "model.head": "embedding", "data.name": "mock", "data.documents": 4},
}


def run_of(case: str, micro_batches: int, device: str, precision: str, compiler: str) -> dict[str, Any]:
    """The settings of a run."""
    return {
        "optimizer.lr": 5e-4,  # for "sequences", two such steps overshoot a minimum: rounding then decides the norm
        **CASES[case],
        "trainer.seq_length": 64,
        "trainer.global_batch_size": BATCH,
        "trainer.micro_batch_size": BATCH // micro_batches,
        "trainer.device": device,
        "trainer.precision": precision,
        "trainer.compile": compiler,
        "schedule.warmup_steps": 2,
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[Step]]:
    """The steps of a case in fp32 on the CPU."""

    @cache
    def found(case: str, micro_batches: int) -> list[Step]:
        return trained_steps(tmp_path_factory.mktemp("reference"), run_of(case, micro_batches, "cpu", "fp32", "never"))

    return found


@pytest.mark.parametrize("compiler", ["never", "auto"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_an_encoder_trains_as_in_fp32(
    tmp_path: Path, reference: Callable[[str, int], list[Step]], case: str, micro_batches: int, compiler: str
) -> None:
    if case == "embedding" and micro_batches > 1:
        pytest.skip("all pairs of a step are in one micro batch")
    expected = reference(case, micro_batches)
    found = trained_steps(tmp_path, run_of(case, micro_batches, "cuda", "bf16", compiler))
    assert len(found) == STEPS
    assert all(math.isfinite(figure) for step in found for figure in step)
    for number, (own, right) in enumerate(zip(found, expected, strict=True)):
        assert own[0] == pytest.approx(right[0], rel=0.01), f"the loss of step {number + 1}"
        assert own[1] == pytest.approx(right[1], rel=0.06), f"the gradient norm of step {number + 1}"
