"""Recomputes a callable in backward (Chen et al., arXiv 1604.06174), by torch's non-reentrant checkpoints.

mplug's random numbers derive from keys that are arguments, so a recomputation draws the same ones. Some kernels draw
from torch's generators; the checkpoint saves their state. Statistics (`mplug_nn.count`) are counted once.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def recomputed(inner: Callable[..., Any], keeps_generators: bool = True) -> Callable[..., Any]:
    """Wrap `inner` so that autograd saves only the arguments of a call and backward recomputes the rest.

    With `keeps_generators`, the recomputation also draws the same numbers from torch's generators. Their state cannot
    be read in a CUDA graph, in which no kernel draws from them.
    """

    def call(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*arguments, **named)
        if torch.compiler.is_compiling():
            return checkpoint(inner, *arguments, use_reentrant=False, context_fn=TRACED, **named)
        return checkpoint(inner, *arguments, use_reentrant=False, preserve_rng_state=keeps_generators, **named)

    return call


def _policy(ctx: Any, op: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    """In a compiled unit, save the outputs of operators that may draw from torch's generator, such as fused attention.

    If they were recomputed there, their generator state would shift the arguments of the graph's backward. Torch would
    then mistake gradient sinks, which backward modifies, for activations, which must not be modified. The cost is
    small: the output of fused attention is needed anyway.
    """
    draws = torch.Tag.nondeterministic_seeded in op.tags
    return CheckpointPolicy.MUST_SAVE if draws else CheckpointPolicy.PREFER_RECOMPUTE


TRACED = partial(create_selective_checkpoint_contexts, _policy)


def _is_not_policy_warning(record: logging.LogRecord) -> bool:
    """Drop torch's warning about in-place operations under a policy; suppliers change nothing in place."""
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_not_policy_warning)
