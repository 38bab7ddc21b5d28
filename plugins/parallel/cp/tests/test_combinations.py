"""Every method, with every kind of attention that it serves, packed samples, layouts and compiled units; fp64.

What a method does not serve is refused, with the words of `test_cp.py`; `test_served.py` compares the table in the
README with the wraps.
"""

from typing import Any

import pytest
from layout_runs import assert_refused
from layout_words import COMPILING
from tiny_models import DECODER

from mplug_testing.parity import require_parity

pytestmark = COMPILING
METHODS: dict[str, dict[str, Any]] = {
    "ring": {},
    "all_gather": {"method": "all_gather"},
    "documents": {"method": "all_gather", "divide": "documents", "equal_length": 16},
    "ulysses": {"method": "ulysses"},
    "chunks": {"method": "ulysses", "head_chunks": 2},
    "hierarchical": {"method": "hierarchical", "ulysses_degree": 2},
}
LLAMA: dict[str, Any] = {**DECODER, "model.name": "llama", "model.num_kv_heads": 4}
WINDOWS: dict[str, Any] = {**LLAMA, "model.window": 7, "model.attention_types": ["window", "full"]}
SINKS: dict[str, Any] = {"model.attention_sinks": True}
CAPS: dict[str, Any] = {"model.attention_soft_cap": 2.0}
KINDS: dict[str, dict[str, Any]] = {
    "full": LLAMA,
    "windows": WINDOWS,
    "windows and sinks": {**WINDOWS, **SINKS},
    "caps": {**LLAMA, **CAPS},
    "capped windows and sinks": {**WINDOWS, **CAPS, **SINKS},
    "alibi": {"model.name": "gpt", "model.position": "alibi"},
}
OF_HEADS_ALONE = {"caps": "soft cap", "capped windows and sinks": "soft cap", "alibi": "alibi bias"}
"""Kinds that only the exchange of heads serves, and the word in the refusal of the other methods."""
LAYOUTS = ("cp2", "cp4", "cp2pp2", "cp2tp2")


def settings_of(method: str, kind: str) -> dict[str, Any]:
    """Samples of 48 positions with 7 documents; two samples in a micro batch."""
    packed = {"data.documents": 7, "trainer.seq_length": 48, "trainer.micro_batch_size": 2}
    return {**packed, **KINDS[kind], **{f"parallel.cp.{name}": value for name, value in METHODS[method].items()}}


def of_heads(method: str) -> bool:
    return METHODS[method].get("method") == "ulysses"


def serves(method: str, kind: str, layout: str) -> bool:
    """Whether a run exists: a ring of groups has at least two ranks in each, and chunks have two heads at least."""
    if method == "hierarchical" and layout != "cp4":
        return False
    if method == "chunks" and layout in ("cp4", "cp2tp2"):  # one head on a rank is one chunk
        return False
    return of_heads(method) or kind not in OF_HEADS_ALONE


SERVED = [(kind, method, one) for one in LAYOUTS for method in METHODS for kind in KINDS if serves(method, kind, one)]


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("compiled", ["never", "aot_eager"])
@pytest.mark.parametrize(("kind", "method", "layout"), SERVED)
def test_a_method_gives_the_run_of_one_process(kind: str, method: str, layout: str, compiled: str) -> None:
    require_parity({**settings_of(method, kind), "trainer.compile": compiled}, layout)


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("method", [name for name in METHODS if not of_heads(name)])
@pytest.mark.parametrize("kind", OF_HEADS_ALONE)
def test_other_kinds_are_refused_where_heads_are_not_exchanged(kind: str, method: str) -> None:
    assert_refused("cp4", settings_of(method, kind), OF_HEADS_ALONE[kind], "parallel.cp.method=ulysses")
