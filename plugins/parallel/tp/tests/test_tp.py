"""Tensor parallelism passes the suite of strategies; with and without sequence parallelism and overlap."""

import pytest

from mplug_testing import ParallelSuite

EVERYTHING = {**ParallelSuite.variants["another-model"], **ParallelSuite.variants["dropout"]}
WHOLE_STREAM = {"parallel.tp.sequence_parallel": False}
OVERLAP = {"parallel.tp.overlap": True}


@pytest.mark.wide(
    "layouts",
    tests=["test_a_variant_gives_the_run_of_one_process"],
    quick=["one-kv-head", "everything-whole-stream-overlap"],
)
@pytest.mark.wide("layouts", tests=["test_a_layout_gives_the_run_of_one_process"], quick=["tp2"])
class TestTensorParallel(ParallelSuite):
    plugin = "tp"
    layouts = ("tp2", "tp4")
    variants = {
        **ParallelSuite.variants,
        "all-kv-heads-and-alibi": {"model.num_kv_heads": 4, "model.position": "alibi"},
        "everything-whole-stream-overlap": {**EVERYTHING, **WHOLE_STREAM, **OVERLAP},
    }
    refused = {
        "tp8": ("tp=8", "4 heads", "use 1 or 2 or 4"),
        "tp32": ("tp=32", "trainer.seq_length=16", "parallel.tp.sequence_parallel=false"),
    }
