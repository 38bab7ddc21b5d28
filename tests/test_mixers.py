"""Token mixers with scans: those of the transformers library, and what blocks of them declare."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from library_models import drawn, wide

from mplug_nn import GatedDeltaNet, KimiDeltaAttention, Mamba2

EXACT = 1e-10
Tensors = dict[str, Tensor]


def library(family: str, kind: str, config: str, **fields: Any) -> nn.Module:
    """A mixer of the library, in fp64, with drawn weights."""
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    settings = getattr(importlib.import_module(f"transformers.models.{family}"), config)(**fields)
    made = drawn(getattr(modeling, kind)(settings, 0))
    made.config = settings
    return made


def differences(theirs: nn.Module, ours: nn.Module, mapped: Callable[[Tensors], Tensors], length: int) -> list[float]:
    """Of outputs, of the gradient of the input, and of the gradients of all weights, relative to the largest."""
    ours = ours.double().to_empty(device="cpu")
    with torch.no_grad():
        for name, x in mapped(dict(theirs.named_parameters())).items():
            ours.get_parameter(name).copy_(x)
    x = torch.randn(2, length, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    expected, found = theirs(inputs[0]), ours(inputs[1], torch.arange(length)[None], torch.zeros(2))
    factors = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    (expected * factors).sum().backward()
    (found * factors).sum().backward()
    grads = mapped({name: one.grad for name, one in theirs.named_parameters() if one.grad is not None})
    pairs = [(found, expected), (inputs[1].grad, inputs[0].grad)]
    pairs += [(one.grad, grads[name]) for name, one in ours.named_parameters()]
    return [float((a.detach() - b.detach()).abs().max() / b.detach().abs().max()) for a, b in pairs]


def of_delta_net(theirs: Tensors) -> Tensors:
    """2 key heads of width 4, 4 value heads of width 3: the rows of a key head and its value heads are together."""
    parts = theirs["in_proj_qkvz.weight"].unflatten(0, (2, 2 * 4 + 2 * 2 * 3)).split((4, 4, 6, 6), dim=1)
    b, a = theirs["in_proj_ba.weight"].unflatten(0, (2, 4)).chunk(2, dim=1)
    rows = [part.flatten(0, 1) for part in (*parts, b, a)]
    return {
        "inputs.weight": torch.cat(rows),
        "conv.weight": theirs["conv1d.weight"][:, 0],
        "norm": theirs["norm.weight"],
        "out.weight": theirs["out_proj.weight"],
        **{name: theirs[name] for name in ("A_log", "dt_bias")},
    }


@pytest.mark.parametrize("length", [5, 70])
def test_a_gated_delta_net_is_that_of_qwen3_next(length: int) -> None:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    widths = {"linear_key_head_dim": 4, "linear_value_head_dim": 3}
    theirs = library("qwen3_next", "Qwen3NextGatedDeltaNet", "Qwen3NextConfig", hidden_size=12, **heads, **widths)
    with wide("qwen3_next"):
        assert max(differences(theirs, GatedDeltaNet(12, 2, 4, 4, 3), of_delta_net, length)) < EXACT


def of_mamba(theirs: Tensors) -> Tensors:
    names = {"in_proj": "inputs", "out_proj": "out"}
    found = {f"{ours}.weight": theirs[f"{name}.weight"] for name, ours in names.items()}
    conv = {"conv.weight": theirs["conv1d.weight"][:, 0], "conv.bias": theirs["conv1d.bias"]}
    return found | conv | {name: theirs[name] for name in ("A_log", "dt_bias", "D")} | {"norm": theirs["norm.weight"]}


@pytest.mark.parametrize("length", [5, 70])
def test_mamba_2_is_that_of_the_library(length: int) -> None:
    sizes = {"num_heads": 4, "head_dim": 6, "state_size": 5, "n_groups": 2, "expand": 2, "chunk_size": 8}
    theirs = library("mamba2", "Mamba2Mixer", "Mamba2Config", hidden_size=12, **sizes)
    with wide("mamba2"):
        assert max(differences(theirs, Mamba2(12, 4, 6, 2, 5), of_mamba, length)) < EXACT


def of_kimi(theirs: Tensors) -> Tensors:
    gates = {"forget_gate.f_a_proj": "decay_down", "forget_gate.f_b_proj": "decay_up"}
    names = {**gates, "g_a_proj": "gate_down", "g_b_proj": "gate_up", "o_proj": "out"}
    return {
        "inputs.weight": torch.cat([theirs[f"{one}_proj.weight"] for one in "qkvb"]),
        "conv.weight": theirs["conv1d.weight"][:, 0],
        **{f"{ours}.weight": theirs[f"{name}.weight"] for name, ours in names.items()},
        "A_log": theirs["forget_gate.A_log"].flatten(),
        "dt_bias": theirs["forget_gate.dt_bias"].flatten(),
        "norm": theirs["o_norm.weight"],
    }


@pytest.mark.parametrize("length", [5, 70])
def test_kimi_delta_attention_is_that_of_the_library(length: int) -> None:
    fields = {"hidden_size": 12, "linear_head_dim": 4, "linear_num_heads": 3}
    theirs = library("kimi_linear", "KimiLinearDeltaAttention", "KimiLinearConfig", num_hidden_layers=1, **fields)
    with wide("kimi_linear"):
        ours = KimiDeltaAttention(12, 3, 4, 4, eps=theirs.config.rms_norm_eps)
        assert max(differences(theirs, ours, of_kimi, length)) < EXACT
