"""Hybrids that train with the kernels of flash-linear-attention on a GPU, beside plain torch.

The reference is the same run in plain torch in fp32, eager. All of it takes a few minutes.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from mplug_fla import limits
from torch import Tensor

from mplug.training.assembly import build
from mplug_testing.harness import tiny_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # those of compilers
]
STEPS = 5
SAMPLES = 4
KINDS = ("gated_delta", "mamba2", "kimi_delta", "gated_linear")
HYBRID: dict[str, Any] = {
    "trainer.device": "cuda",
    "kernels.attention": "reference",  # serves packed documents in fp32
    "trainer.seq_length": 192,
    "trainer.global_batch_size": SAMPLES,
    "schedule.warmup_steps": 0,
    "optimizer.lr": 3e-3,
    "model.name": "llama",
    "model.vocab_size": 259,
    "model.hidden_size": 128,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.ffn_hidden_size": 192,
    "model.num_layers": 5,
    "model.mixer_types": [*KINDS, "attention"],
    "model.linear_num_key_heads": 4,
    "model.linear_key_head_dim": 32,
    "model.linear_value_head_dim": 32,
}
FLA = {"kernels.scan": "fla", "kernels.convolution": "fla", "kernels.fla.variants": 1}
PLAIN = {"kernels.scan": None, "kernels.convolution": None}
WAYS: dict[str, dict[str, Any]] = {
    "plain, compiled, fp32": {**PLAIN, "trainer.precision": "fp32", "trainer.compile": "inductor"},
    "plain, compiled, bf16": {**PLAIN, "trainer.precision": "bf16", "trainer.compile": "inductor"},
    "fla, eager, bf16": {**FLA, "trainer.precision": "bf16"},
    "fla, compiled, bf16": {**FLA, "trainer.precision": "bf16", "trainer.compile": "inductor"},
}
BANDS = {"fp32": (1e-4, 1e-3, 5e-3), "bf16": (0.005, 0.02, 0.15)}
"""Largest relative errors of losses, of gradient norms, and of each gradient in the first step, as a share of its norm.

The kernels have no fp32. The gradient of a decay sums differences of large numbers, so it has the largest error.
"""


@dataclass(frozen=True)
class Followed:
    """The loss and the gradient norm of every step, and the gradients of the first one."""

    steps: list[tuple[float, float]]
    gradients: dict[str, Tensor]


def followed(settings: dict[str, Any]) -> Followed:
    """Train `STEPS` steps on the samples of the first one, so that losses fall."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.compiler.reset()
    run = tiny_run(settings)
    parts, found = build(run), Followed([], {})
    batches = list(parts.train_loader.loader.take(SAMPLES))
    for step in range(1, STEPS + 1):
        run.step = step
        parts.stepper.forward_backward(parts.train_loader.step_of(batches), step)
        if step == 1:
            found.gradients.update({piece.name: piece.gradient.double().cpu() for piece in parts.pieces})
        result = parts.stepper.update(run.config.optimizer.lr, run.config.optimizer.weight_decay)
        found.steps.append((float(result.loss), float(result.grad_norm)))
    return found


@cache
def reference(documents: int) -> Followed:
    """Plain torch in fp32, eager, with one micro batch."""
    whole = {"data.documents": documents, "trainer.micro_batch_size": SAMPLES}
    return followed({**HYBRID, **PLAIN, **whole, "trainer.precision": "fp32"})


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("documents", [1, 3], ids=["whole", "packed"])
@pytest.mark.parametrize("way", WAYS)
def test_losses_norms_and_gradients_of_a_hybrid_are_those_of_plain_torch(
    way: str, documents: int, micro_batches: int
) -> None:
    if way.startswith("fla") and limits.missing():
        pytest.skip(limits.missing())
    own = {"data.documents": documents, "trainer.micro_batch_size": SAMPLES // micro_batches}
    found, exact = followed({**HYBRID, **WAYS[way], **own}), reference(documents)
    of_losses, of_norms, of_gradients = BANDS[way.rpartition(" ")[2]]
    (losses, norms), (right, right_norms) = zip(*found.steps, strict=True), zip(*exact.steps, strict=True)
    errors = {name: float((found.gradients[name] - one).norm() / one.norm()) for name, one in exact.gradients.items()}
    worst = sorted(errors.items(), key=lambda item: -item[1])[:3]
    print(f"{way}: losses {losses} beside {right}, norms {norms} beside {right_norms}, gradients {worst}")
    assert losses == pytest.approx(right, rel=of_losses)
    assert norms == pytest.approx(right_norms, rel=of_norms)
    assert {name: error for name, error in errors.items() if not error < of_gradients} == {}
