"""T5 trains on a GPU in bf16: steps of compiled units, with one and two micro batches, by flex and sdpa."""

import math
from typing import Any

import pytest

from mplug_testing.harness import train_steps

pytestmark = pytest.mark.gpu
SETTINGS: dict[str, Any] = {
    "model.name": "t5",
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
    "trainer.device": "cuda",
    "trainer.precision": "bf16",
    "trainer.compile": "auto",
    "trainer.global_batch_size": 8,
}


def losses(**changes: Any) -> list[float]:
    return [float(loss) for loss in train_steps({**SETTINGS, **changes}).losses]


@pytest.mark.parametrize("attention", ["flex", "sdpa"])
def test_steps_have_the_losses_of_fp32_on_the_same_gpu(attention: str) -> None:
    kernel = {"kernels.attention": attention}
    expected = losses(**{"trainer.precision": "fp32", "trainer.compile": "never", "kernels.attention": "sdpa"})
    assert all(map(math.isfinite, expected))
    for size in (8, 4):
        found = losses(**kernel, **{"trainer.micro_batch_size": size})
        assert found == pytest.approx(expected, rel=2e-2), size
