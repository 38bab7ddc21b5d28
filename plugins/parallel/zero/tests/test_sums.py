"""The steps of a bucket's sum, with stand-ins for its collectives."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from mplug_zero import sums
from torch import Tensor


def test_sums_in_another_dtype_return_to_the_gradients_that_they_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owners add 1 to every element, and the ranks with copies double it."""

    def adding(x: Tensor, group: Any) -> Any:
        x.add_(1)
        return SimpleNamespace(wait=lambda: None)

    def doubling(x: Tensor, group: Any) -> Any:
        x.mul_(2)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(sums, "summing_parts", adding)
    monkeypatch.setattr(sums, "summing_all", doubling)
    gradients, checked = torch.arange(8, dtype=torch.float32), SimpleNamespace(check=lambda: None)
    lane = SimpleNamespace(
        shard=SimpleNamespace(gradients=gradients, owned=slice(0, 8), owned_gradients=gradients, transient=False),
        groups=SimpleNamespace(owners=SimpleNamespace(size=lambda: 1), copies=object()),
        exchanges=[checked, checked],
        num_sums=1,
    )
    for work in sums._journey(cast(Any, lane), torch.float64, True):
        work.wait()
    assert gradients.tolist() == [2.0 * (number + 1) for number in range(8)]
