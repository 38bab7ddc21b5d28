"""Data parallelism passes the suite of strategies, with large and small buckets."""

from mplug_testing import ParallelSuite


class TestDataParallel(ParallelSuite):
    plugin = "dp"
    layouts = ("dp2", "dp4")
    variants = {
        "everything": {**ParallelSuite.variants["another-model"], **ParallelSuite.variants["dropout"]},
        "small-buckets": {"parallel.dp.bucket_mib": 0.01},
    }
    refused = {"dp8": ("trainer.global_batch_size", "8", "2", "8 data-parallel ranks", "a multiple of 16")}
