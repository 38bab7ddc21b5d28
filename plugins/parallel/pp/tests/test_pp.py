"""Pipeline parallelism passes the suite of strategies, under every schedule and division."""

import pytest

from mplug_testing import ParallelSuite

SCHEDULE = "parallel.pp.schedule"


@pytest.mark.wide("layouts", tests=["test_a_variant_gives_the_run_of_one_process"], quick=["zb-v"])
class TestPipelineParallel(ParallelSuite):
    plugin = "pp"
    layouts = ("pp2", "pp4")
    variants = {
        "everything": {**ParallelSuite.variants["another-model"], **ParallelSuite.variants["dropout"]},
        "interleaved": {SCHEDULE: "interleaved", "parallel.pp.split": [1, 2, 1, 2]},
        "zb-v": {SCHEDULE: "zb-v", **ParallelSuite.variants["dropout"]},
    }
    refused = {"pp6": ("pp=6", "5 units", "use pp=5 or less")}
    examples = {"schedule": ["gpipe"], "chunks": [3]}
    beside = {
        "chunks": {SCHEDULE: "interleaved"},
        "group": {SCHEDULE: "interleaved", "trainer.micro_batch_size": 1},
        "limit": {SCHEDULE: "zb-limited", "trainer.micro_batch_size": 1},
    }
