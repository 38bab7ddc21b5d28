"""Whether a recording of an optimizer's step can be replayed with other scalars and gradients."""

import torch

from mplug.testing import dense
from mplug.testing.recording import Operations, Reads

STEPS = ((2e-2, 0.3, 0.25, 0.0), (5e-3, 0.0, 4.0, 0.0), (1e-2, 0.2, 1.0, 1.0), (3e-2, 0.1, 0.125, 0.0))
"""(learning rate, weight decay, scale, skip) of the replayed steps."""


def replay_fault(eager: dense.Bench, replayed: dense.Bench) -> str:
    """What differs between steps of two equal optimizers if those of the second are replayed; empty if nothing does.

    An optimizer without `tensor_decay` gets a constant weight decay.
    """
    for bench in (eager, replayed):
        bench.step(1)
    scalars, recording = replayed.scalars(), Operations()
    try:
        recording.record(lambda: replayed.optimizer.step(scalars))
    except Reads as read:
        return f"its step cannot be recorded: {read}"
    for number, (lr, decay, scale, skip) in enumerate(STEPS, start=2):
        values = {"lr": lr, "weight_decay": decay, "scale": scale, "skip": skip}
        if not isinstance(scalars.weight_decay, torch.Tensor):
            values["weight_decay"] = scalars.weight_decay
        eager.step(number, dense.gradient_of, **values)
        for piece in replayed.pieces:
            piece.gradient.copy_(dense.gradient_of(piece, number))
        for name, value in values.items():
            tensor = getattr(scalars, name)
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(value)
        recording.replay()
        changed = dense.other_bits(eager.snapshot(), replayed.snapshot())
        if changed:
            return f"in a replayed step, {changed} has other bits than in a step that runs"
    return ""
