"""The same run under layouts of several strategies and other models: it equals that of one process.

Each strategy alone, and beside one other, is run by its own tests, through `ParallelSuite`. docs/faults.md says which
mistakes the comparison finds.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest

from mplug_testing import Fault, ParallelSuite
from mplug_testing.harness import difference
from mplug_testing.parity import require_parity, trained_once

WHOLE_STREAM = "parallel.tp.sequence_parallel=false"
ONE_KV_HEAD = {"model.num_kv_heads": 1}
TIED = {"model.tie_embeddings": True}
EVERYTHING = {
    "model.position": "learned",
    "model.max_position_embeddings": 16,
    "model.bias": True,
    "model.activation": "swiglu",
    "model.ffn_hidden_size": 64,
    "model.norm": "rmsnorm",
    "model.dropout": 0.1,
    **TIED,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("dp2tp2pp2", {}),
    (f"tp4 {WHOLE_STREAM}", {}),
    ("tp4", ONE_KV_HEAD),
    ("tp2pp2", {**EVERYTHING, **ONE_KV_HEAD}),
    ("pp4", {"parallel.pp.split": [1, 1, 3, 1], **TIED}),
    ("tp2", {"kernels.default": "reference", "model.attention_dropout": 0.1, "model.dropout": 0.1}),
]


QUICK = ("tp2pp2",)
MARKED = [case if case[0] in QUICK else pytest.param(*case, marks=pytest.mark.wide("layouts")) for case in CASES]


@pytest.mark.parametrize(("layout", "settings"), MARKED, ids=str)
def test_a_layout_of_any_model_gives_the_run_of_one_process(layout: str, settings: dict[str, Any]) -> None:
    require_parity(settings, layout)


def test_an_error_of_1e_7_in_the_gradient_of_any_parameter_is_seen() -> None:
    (reference,) = trained_once({})
    for name in reference.shapes:
        wrong = [(start, values * (1 + 1e-7)) for start, values in reference.gradients[0][name]]
        gradients = [{**reference.gradients[0], name: wrong}, *reference.gradients[1:]]
        assert f"gradient of '{name}'" in difference([replace(reference, gradients=gradients)], reference)


def test_a_run_that_one_process_refuses_is_a_fault_and_no_layout_to_skip() -> None:
    for layout in ("", "dp2"):
        with pytest.raises(Fault, match=r"the run is refused in one process.*num_attention_heads=3 does not divide"):
            require_parity({"model.num_attention_heads": 3}, layout)


@pytest.mark.wide("suites")
def test_a_suite_skips_a_run_that_its_ranks_refuse_where_it_is_tried_unasked(text_file: Path) -> None:
    """One that the author asks for is a fault."""
    small = {"data.name": "text", "data.path": str(text_file), "model.vocab_size": 100}
    remedies = ("", "; set .* that are not refused")
    reason, asked = (f"is refused{remedy}: .*the data has tokens up to 255" for remedy in remedies)

    class DataParallel(ParallelSuite):
        plugin = "dp"
        settings = small

    with pytest.raises(SkipTest, match=f"^layout 'dp2' {reason}"):
        require_parity(small, "dp2", named_by_author=False)
    with pytest.raises(Fault, match=f"^layout 'dp2' {asked}"):
        require_parity(small, "dp2")
    with pytest.raises(Fault, match=f"^under layout 'dp2' the run {asked}"):
        DataParallel().test_a_layout_gives_the_run_of_one_process("dp2")
    with pytest.raises(SkipTest, match=f"^under layout 'dp2pp2' the run {reason}"):
        DataParallel().test_a_layout_gives_the_run_of_one_process("dp2pp2")
