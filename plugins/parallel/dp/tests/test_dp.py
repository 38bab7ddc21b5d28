"""Data parallelism passes the suite of strategies, with large and small buckets."""

import pytest

from mplug_testing import ParallelSuite


@pytest.mark.wide("layouts", tests=["test_a_variant_gives_the_run_of_one_process"])
@pytest.mark.wide("layouts", tests=["test_a_layout_gives_the_run_of_one_process"])
class TestDataParallel(ParallelSuite):
    plugin = "dp"
    layouts = ("dp2", "dp4")
    variants = {
        "everything": {**ParallelSuite.variants["another-model"], **ParallelSuite.variants["dropout"]},
        "small-buckets": {"parallel.dp.bucket_mib": 0.01},
    }
    refused = {"dp8": ("trainer.global_batch_size", "8", "2", "8 data-parallel ranks", "a multiple of 16")}
