"""What the suites try and note: values of a field's type, and auxiliary losses of a forward pass."""

import sys

import pytest
import torch

from mplug.tensors import statistics
from mplug_nn import router
from mplug_testing.derivatives import auxiliary_losses
from mplug_testing.values import other_values


def test_true_is_another_value_than_one() -> None:
    assert list(other_values(bool | int, (), 1))[:2] == [False, True]
    assert list(other_values(bool, (), True)) == [False]


def test_auxiliary_losses_are_noted_beside_a_module_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sys.modules` holds None for a module whose import is forbidden."""
    monkeypatch.setitem(sys.modules, "nova_forbidden", None)
    with auxiliary_losses() as seen:
        router.add_auxiliary(torch.zeros(2), torch.tensor(3.0), torch.tensor(0.5))
    assert [float(loss) for loss in seen] == [1.5]
    assert router.add_auxiliary is statistics.add_auxiliary
