"""Running a callable again in backward (Chen et al., arXiv 1604.06174), by torch's own non-reentrant checkpoints.

Random numbers are the same ones by themselves: they derive from keys that are arguments. Of torch's generators, which
some kernels draw from, the state is kept. What is counted (`mplug.nn.count`) is counted once.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def recomputed(inner: Callable[..., Any]) -> Callable[..., Any]:
    """`inner`, of whose calls only the arguments are kept for backward."""

    def call(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*arguments, **named)
        if torch.compiler.is_compiling():
            return checkpoint(inner, *arguments, use_reentrant=False, context_fn=TRACED, **named)
        return checkpoint(inner, *arguments, use_reentrant=False, **named)

    return call


def _policy(ctx: Any, op: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    """In a compiled unit, what may draw from torch's generator is kept: fused attention, whose output is wanted anyway.

    Run again there, it would shift the arguments of the graph's backward by its generator's state, and torch would take
    gradient sinks, which backward changes, for activations, which nobody may.
    """
    draws = torch.Tag.nondeterministic_seeded in op.tags
    return CheckpointPolicy.MUST_SAVE if draws else CheckpointPolicy.PREFER_RECOMPUTE


TRACED = partial(create_selective_checkpoint_contexts, _policy)


def _is_no_question(record: logging.LogRecord) -> bool:
    """Torch asks whoever has a policy whether anything is changed in place. What fills a slot changes nothing."""
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_no_question)
