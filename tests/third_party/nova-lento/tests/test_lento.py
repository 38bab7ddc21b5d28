"""Lento keeps the contract of models, under the layouts that do not divide the sequence of its recurrence."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mplug_testing import ModelSuite


class TestLento(ModelSuite):
    plugin = "lento"
    settings = {"model": {"name": "lento", "num_layers": 3, "hidden_size": 32, "state_size": 24, "vocab_size": 259}}
    layouts = ("", "tp2", "pp2", "zero2", "fsdp2", "pp2tp2")

    def reference(self, weights: Any, batch: Any, config: Any) -> Tensor:
        """HGRN with real numbers (arXiv 2311.04823, section 3), token by token."""
        x = weights["embedding.weight"][batch["tokens"]]
        for n in range(config.num_layers):
            own = {name.removeprefix(f"blocks.{n}."): w for name, w in weights.items() if f"blocks.{n}." in name}
            forget, value, gate = (normed(x, own["norm.weight"]) @ own["enter.weight"].T).chunk(3, dim=-1)
            decay, state, states = torch.sigmoid(forget + own["scan.decay"]), 0 * value[:, 0], []
            for at in range(x.shape[1]):
                state = decay[:, at] * state + (1 - decay[:, at]) * value[:, at]
                states.append(state)
            x = x + (F.silu(gate) * torch.stack(states, dim=1)) @ own["leave.weight"].T
        return normed(x, weights["head.norm.weight"]) @ weights["head.project.weight"].T


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm (arXiv 1910.07467)."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight
