"""T5 trains on one GPU in bf16: three steps, eager and compiled, with one and with two micro batches a step.

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
SETTINGS: dict[str, Any] = {
    "model.name": "t5",
    "model.preset": None,
    "model.num_layers": 2,
    "model.num_decoder_layers": 2,
    "model.hidden_size": 128,
    "model.num_attention_heads": 4,
    "model.head_dim": 32,
    "model.ffn_hidden_size": 256,
    "model.vocab_size": 512,
    "model.encoder_length": 128,
    "data.name": "spans",
    "data.of": {"name": "mock", "vocab_size": 400},
    "data.end_token": 1,
    "data.encoder_length": 128,
    "trainer.seq_length": 32,
    "trainer.global_batch_size": BATCH,
    "schedule.warmup_steps": 2,
    "optimizer.lr": 5e-4,
}
CASES: dict[str, dict[str, Any]] = {
    "v1.1": {},
    "tied, relu": {"model.activation": "relu", "model.tie_embeddings": True},
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Step]]:
    """The steps of a case in fp32 on the CPU; the number of micro batches does not change them."""

    @cache
    def found(case: str) -> list[Step]:
        own = {"trainer.device": "cpu", "trainer.precision": "fp32", "trainer.compile": "never"}
        return trained_steps(tmp_path_factory.mktemp("reference"), {**SETTINGS, **CASES[case], **own})

    return found


@pytest.mark.parametrize(("attention", "compiler"), [("sdpa", "never"), ("sdpa", "auto"), ("flex", "auto")])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_t5_trains_as_in_fp32(
    tmp_path: Path,
    reference: Callable[[str], list[Step]],
    case: str,
    micro_batches: int,
    attention: str,
    compiler: str,
) -> None:
    expected = reference(case)
    found = trained_steps(
        tmp_path,
        {
            **SETTINGS,
            **CASES[case],
            "trainer.device": "cuda",
            "trainer.precision": "bf16",
            "trainer.compile": compiler,
            "trainer.micro_batch_size": BATCH // micro_batches,
            "kernels.attention": attention,
        },
    )
    assert len(found) == STEPS
    assert all(math.isfinite(figure) for step in found for figure in step)
    for number, (own, right) in enumerate(zip(found, expected, strict=True)):
        assert own[0] == pytest.approx(right[0], rel=0.01), f"the loss of step {number + 1}"
        assert own[1] == pytest.approx(right[1], rel=0.06), f"the gradient norm of step {number + 1}"
