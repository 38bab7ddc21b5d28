"""Heads exchanged by the copy engines of two GPUs: the bits of messages."""

from typing import Any

import pytest
from gpus import traced

from mplug_testing import run_workers

pytestmark = pytest.mark.gpu(2)

SETTINGS: dict[str, Any] = {
    "trainer.device": "cuda",
    "trainer.precision": "fp32",
    "trainer.deterministic": True,
    "model.num_kv_heads": 4,
    "parallel.layout": "cp2",
    "parallel.cp.method": "ulysses",
    "parallel.cp.head_chunks": 2,
}


@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
@pytest.mark.parametrize("compiler", ["never", "inductor"])
def test_heads_copied_by_copy_engines_change_no_bit(compiler: str) -> None:
    one, other = (
        run_workers(2, traced, {**SETTINGS, "trainer.compile": compiler, "parallel.cp.transport": transport})
        for transport in ("copy_engines", "messages")
    )
    assert [trace.losses for trace in one] == [trace.losses for trace in other]
    assert [trace.norms for trace in one] == [trace.norms for trace in other]
