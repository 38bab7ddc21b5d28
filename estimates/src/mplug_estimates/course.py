"""Warnings about a run that repeats its data, or that has learnt nothing. Imports no torch."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mplug.run.run import Run

FAR_ABOVE = 1.5
"""A model whose loss is more than so many times that of a uniform guess has learnt nothing, or has diverged."""


def loss_warning(loss: float | None, vocab_size: int) -> list[str]:
    """A warning if the last loss of a run (nats per token) is far above that of a model that knows nothing."""
    uniform = math.log(max(vocab_size, 2))
    if loss is None or loss <= FAR_ABOVE * uniform:
        return []
    return [
        f"the last loss, {loss:,.4g}, is far above {uniform:.4g}, the loss of a uniform guess among {vocab_size:,} "
        f"tokens: the run has diverged, or has learnt nothing; try a lower optimizer.lr (--lr), or a longer warm-up"
    ]


def data_gap(run: "Run", samples: int | None) -> list[str]:
    """A warning if a step takes more samples than the training data hold; None: the loader does not state them."""
    trainer = run.config.trainer
    size = trainer.global_batch_size
    if not samples or samples >= size:
        return []
    return [
        f"the training data hold {samples:,} sample{'s' * (samples != 1)} of {trainer.seq_length:,} tokens, and a step "
        f"takes {size:,}: each step reads all data {size / samples:.1f} times, and the run "
        f"{size * trainer.steps / samples:,.0f} times; set a smaller trainer.global_batch_size (--batch-size) or "
        f"trainer.seq_length (--seq-length), or add data"
    ]
