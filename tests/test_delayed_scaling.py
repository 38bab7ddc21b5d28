"""Delayed scaling: buffers of a site, and scales that follow from the largest values of the last steps."""

import pytest
import torch
from torch import Tensor

from mplug import Site
from mplug.layout.plan import Init, Parameter
from mplug_nn import DelayedScaling, Experts, Linear

E4M3, E5M2 = 448.0, 57344.0


def site() -> Site:
    with torch.device("meta"):
        layer = Linear(32, 64, bias=False)
    described = {"weight": Parameter(("mlp", "embed"), Init("normal"))}
    return Site("blocks.*.up", "Linear.product", layer, "blocks.0.up", parameters=described)


def states(scaling: DelayedScaling, **largest: Tensor) -> dict[str, Tensor]:
    """The buffers of several sites after a step with these largest values [N]."""
    count = len(next(iter(largest.values())))
    declared = scaling.buffers(site())
    return {**{name: torch.full((count, *one.shape), one.value) for name, one in declared.items()}, **largest}


def test_each_operand_has_a_statistic_over_its_own_axes_a_history_and_a_scale() -> None:
    declared = DelayedScaling({"input": E4M3, "gradient": E5M2, "weight": E4M3}, steps=7).buffers(site())
    assert {name: (one.shape, one.over, one.reduction) for name, one in declared.items() if one.over} == {
        "input": ((), ("batch", "sequence", "embed"), "max"),
        "gradient": ((), ("batch", "sequence", "mlp"), "max"),
        "weight": ((), ("mlp", "embed"), "max"),
    }
    assert {name: (one.shape, one.value) for name, one in declared.items() if not one.over} == {
        **{f"{name}_history": ((7,), 0.0) for name in ("input", "gradient", "weight")},
        "input_scale": ((1,), 16.0),
        "gradient_scale": ((1,), 256.0),
        "weight_scale": ((1,), 896.0),
    }


def test_experts_have_the_buffers_of_both_products_and_their_scales_follow() -> None:
    with torch.device("meta"):
        experts = Experts(32, 64, 4, "swiglu")
    dims = {"up": ("expert", "mlp", "embed"), "down": ("expert", "embed", "mlp")}
    entries = {name: Parameter(axes, Init("normal")) for name, axes in dims.items()}
    at = Site("blocks.*.experts", "Experts.product", experts, "blocks.0.experts", parameters=entries)
    scaling = DelayedScaling({"input": E4M3, "gradient": E5M2}, steps=2)
    declared = scaling.buffers(at)
    tokens = ("batch", "sequence", "expert")
    assert {name: one.over for name, one in declared.items() if one.over} == {
        "up_input": (*tokens, "embed"),
        "up_gradient": (*tokens, "mlp"),
        "down_input": (*tokens, "mlp"),
        "down_gradient": (*tokens, "embed"),
    }
    state = {name: torch.full((1, *one.shape), one.value) for name, one in declared.items()}
    state |= {"up_input": torch.tensor([7.0]), "down_gradient": torch.tensor([0.5])}
    found = scaling.step_ended(state)
    assert found.keys() == {name for name, one in declared.items() if not one.over}
    assert found["up_input_scale"].tolist() == [[448 / 7.0]]
    assert found["down_gradient_scale"].tolist() == [[57344 / 0.5]]
    assert found["down_input_scale"].tolist() == [[16.0]]


def test_scales_follow_the_largest_value_of_the_last_steps() -> None:
    scaling = DelayedScaling({"input": E4M3, "gradient": E5M2}, steps=2, margin=1)
    state, seen = states(scaling, input=torch.zeros(2), gradient=torch.zeros(2)), []
    for largest in (0.0, 7.0, 3.5, 0.5, 0.25):
        state |= {"input": torch.tensor([largest, 1.0]), "gradient": torch.full((2,), largest)}
        state |= scaling.step_ended(state)
        seen.append((float(state["input_scale"][0]), float(state["gradient_scale"][0])))
    in_history = [None, 7.0, 7.0, 3.5, 0.5]
    assert seen == [(16.0, 256.0) if one is None else (448 / one / 2, 57344 / one / 2) for one in in_history]
    assert state["input_history"].tolist() == [[0.25, 0.5], [1.0, 1.0]]


def test_a_scale_stays_if_a_history_is_zero_or_not_finite_and_is_never_infinite() -> None:
    scaling, bad = DelayedScaling({"gradient": E5M2}, steps=2), (0.0, torch.inf, torch.nan, 1e-40)
    scales = scaling.step_ended(states(scaling, gradient=torch.tensor(bad)))["gradient_scale"]
    assert scales.flatten().tolist() == [256.0, 256.0, 256.0, 2.0**126]


def test_scales_are_powers_of_two_if_asked_for_and_operands_have_their_names() -> None:
    scaling = DelayedScaling({"input": E4M3}, steps=1, margin=2, power_of_two=True)
    scales = scaling.step_ended(states(scaling, input=torch.tensor([3.0, 3.5, 1e-3])))["input_scale"]
    assert scales.flatten().tolist() == [128 / 4, 128 / 4, 2.0**18 / 4]
    wide = {name: value.double() for name, value in states(scaling, input=torch.tensor([7.0])).items()}
    assert scaling.step_ended(wide)["input_scale"].dtype == torch.float64
    with pytest.raises(ValueError, match="'output' is not an operand; `limits` names input, gradient, weight"):
        DelayedScaling({"output": E4M3}, steps=1)
