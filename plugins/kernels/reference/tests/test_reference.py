"""The reference kernel: the compositions of `mplug_nn`, computed in fp32 whatever comes in, and rounded once."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from mplug_reference import Reference
from torch import Tensor

from mplug_testing import KernelSuite
from mplug_testing.kernel_cases import Case, cases
from mplug_testing.kernel_checks import Trial, copied, outcome

SUPPLIERS = {slot: one for offer in Reference(Reference.Config()).offer() for slot, one in offer.suppliers.items()}
LOSS = "Loss.cross_entropy"
CASES = [
    ("Attention.core", "grouped KV heads"),
    ("Attention.core", "attention sinks and a window"),
    ("Attention.prepare_qk", "QK-norm, then rotary positions"),
    ("MLP.activation", "swiglu"),
    ("MLP.activation", "swiglu with a bias"),
    ("Norm.norm_residual", "layernorm with a residual"),
    ("Norm.norm_residual", "rmsnorm with a residual"),
    ("Scan.core", "kind 'delta', documents and states"),
    ("Scan.core", "kind 'channel decay', documents and states"),
    ("Convolution.core", "documents and states"),
]


OF_PLAIN_TORCH = [
    "test_it_has_the_capabilities_that_it_grants",
    "test_tensors_that_are_not_contiguous_give_the_same",
    "test_inputs_are_left_as_they_were",
    "test_the_same_call_gives_the_same_bits",
]
"""The reference is plain torch beside itself: these would show a mistake of the suite alone."""


@pytest.mark.wide("suites", tests=["test_values_and_gradients_are_those_of_plain_torch"], quick=["fp32"])
@pytest.mark.wide("suites", tests=OF_PLAIN_TORCH)
class TestReference(KernelSuite):
    plugin = "reference"


def test_each_slot_is_an_offer_of_its_own() -> None:
    assert sorted(SUPPLIERS) == sorted({LOSS, *(slot for slot, _ in CASES)})
    assert all(len(offer.suppliers) == 1 for offer in Reference(Reference.Config()).offer())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("slot", "name"), CASES)
def test_results_and_gradients_are_computed_in_fp32_and_rounded_once(slot: str, name: str, dtype: torch.dtype) -> None:
    """They differ from those of fp64 by half a unit in the last place of their type."""
    found, exact = both(slot, name, dtype)
    for key, right in exact.items():
        assert found[key].dtype is (dtype if right.is_floating_point() else right.dtype)
        atol = 4e-6 * max(1.0, float(right.abs().max())) if "gradient" in key else 2e-6
        half_a_unit = torch.finfo(dtype).eps / 2 * 1.1
        torch.testing.assert_close(found[key].double(), right.double(), rtol=half_a_unit, atol=atol, msg=key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_loss_is_an_fp32_sum_whatever_the_hidden_states_are(dtype: torch.dtype) -> None:
    found, exact = both(LOSS, "ignored labels", dtype)
    assert found["the loss"].dtype is torch.float32
    torch.testing.assert_close(found["the loss"].double(), exact["the loss"], rtol=1e-3, atol=0)
    assert torch.equal(found["the number of targets"], exact["the number of targets"])


def both(slot: str, name: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The results of a case in a type by the plugin, and in fp64 by the compositions of `mplug_nn`."""
    (case,) = (one for one in cases() if slot in one.slots and one.name == name)
    leaves = Trial(case, SUPPLIERS, dtype, "cpu", name).leaves()
    wide = {key: x.detach().double().requires_grad_() if x.is_floating_point() else x for key, x in leaves.items()}
    return results(SUPPLIERS, case, leaves), results(case.plain, case, wide)


def results(suppliers: Mapping[str, Any], case: Case, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    given = copied(leaves)
    return {key: x for key, x in outcome(case.bind(suppliers, given)(), leaves, given).items() if x is not None}
