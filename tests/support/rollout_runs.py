"""Settings of tiny runs whose completions have rewards."""

from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2] / "plugins/data/rollouts/tests"
TINY: dict[str, Any] = {
    "data.name": "rollouts",
    "data.path": str(HERE / "prompts.jsonl"),
    "data.rewards": [f"{HERE / 'rewarding.py'}:share_of_a"],
    "data.num_generations": 4,
    "data.max_tokens": 7,
    "data.lanes": 3,
    "data.per_sample": 2,
    "data.validation_percent": 30,
    "objectives.grpo.loss": "grpo",
    "trainer.seq_length": 48,
    "trainer.global_batch_size": 4,
    "trainer.eval_samples": 2,
    "kernels.default": None,
    "optimizer.lr": 0.02,
}
GIVEN: dict[str, Any] = {
    **{name: value for name, value in TINY.items() if name not in ("data.rewards", "trainer.global_batch_size")},
    "data.completions": "given",
    "data.path": str(HERE / "given.jsonl"),
}
EXACT: dict[str, Any] = {**TINY, "trainer.deterministic": True, "trainer.precision": "fp32"}
