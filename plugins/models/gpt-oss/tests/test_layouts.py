"""Windows and attention sinks of gpt-oss under context parallelism: losses, gradients and norms of one process."""

from typing import Any

import pytest
from tiny_models import DECODER

from mplug_testing.parity import require_parity

TINY: dict[str, Any] = {
    **DECODER,
    "model.name": "gpt-oss",
    "kernels.attention": None,
    "model.head_dim": 16,
    "model.window": 4,
    "model.num_experts": 4,
    "model.num_experts_per_token": 2,
}
PACKED = {"data.documents": 3}
WIDE = pytest.mark.wide("layouts")
CASES = [
    pytest.param("cp2ep2", PACKED, id="cp2ep2 packed"),
    pytest.param("cp2", {}, id="cp2", marks=WIDE),
    pytest.param("cp4", PACKED, id="cp4 packed", marks=WIDE),
    pytest.param("cp2pp2", {}, id="cp2pp2", marks=WIDE),
    pytest.param("cp2tp2", PACKED, id="cp2tp2 packed", marks=WIDE),
    pytest.param("cp2 parallel.cp.method=all_gather", {}, id="cp2 all_gather", marks=WIDE),
    pytest.param(
        "cp4 parallel.cp.method=hierarchical parallel.cp.ulysses_degree=2", PACKED, id="cp4 hierarchical", marks=WIDE
    ),
]


@pytest.mark.wide("layouts")
@pytest.mark.parametrize(("layout", "settings"), CASES)
def test_a_ring_with_windows_and_sinks_computes_what_one_process_does(layout: str, settings: dict[str, Any]) -> None:
    require_parity({**TINY, **settings}, layout)
