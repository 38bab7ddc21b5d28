"""The operations of a training step, recorded: which ones, in which order, on tensors of which shapes and devices."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mplug.training.assembly import build
from mplug_testing.fields import digest
from mplug_testing.harness import TinySettings, in_fp64, tiny_run


class OperationLog(TorchDispatchMode):
    """Records every operation in the block, collectives included; `text` is a digest of the record."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made = blake2b(digest_size=16)

    @property
    def text(self) -> str:
        """The digest so far."""
        return self._made.hexdigest()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch calls this for each operation."""
        tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        shapes = [(tuple(x.shape), x.dtype, x.device.type) for x in tensors]
        self._made.update(repr((str(func), shapes)).encode())
        return func(*args, **(kwargs or {}))


def step_seen(settings: TinySettings) -> tuple[str, str]:
    """Train one step as a rank of the run; in fp64 by default.

    Returns digests of the operations, and of the loss, the gradients and the norm.
    """
    run = tiny_run(in_fp64(settings))
    config, parts = run.config, build(run)
    batches = list(parts.train_loader.take(config.trainer.global_batch_size))
    run.step = 1
    with OperationLog() as log:
        parts.stepper.forward_backward(batches, 1)
        gradients = [piece.gradient.clone() for piece in parts.pieces]
        result = parts.stepper.update(config.optimizer.lr, config.optimizer.weight_decay)
    return log.text, digest(result.loss, gradients, result.grad_norm)


def steps_seen(runs: Sequence[TinySettings]) -> list[tuple[str, str]]:
    """`step_seen` of several runs of as many ranks, one by one, in the same processes."""
    torch.set_num_threads(1)
    return [step_seen(settings) for settings in runs]
