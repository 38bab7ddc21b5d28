"""Data parallelism passes the suite of strategies, with large and small buckets."""

import pytest

from mplug_testing import ParallelSuite


class TestDataParallel(ParallelSuite):
    plugin = "dp"
    layouts = ("dp2", "dp4")
    variants = {
        "everything": {**ParallelSuite.variants["another-model"], **ParallelSuite.variants["dropout"]},
        "small-buckets": {"parallel.dp.bucket_mib": 0.01},
    }
    refused = {"dp8": ("trainer.global_batch_size", "8", "2", "8 data-parallel ranks", "a multiple of 16")}

    @pytest.mark.wide("suites")
    def test_every_field_of_its_config_has_an_effect(self) -> None:
        super().test_every_field_of_its_config_has_an_effect()
