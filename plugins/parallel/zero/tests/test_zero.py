"""ZeRO passes the suite of strategies."""

from mplug_testing import ParallelSuite


class TestZeRO(ParallelSuite):
    plugin = "zero"
    layouts = ("zero2", "zero4")
    variants = {
        "everything": {**ParallelSuite.variants["another-model"], **ParallelSuite.variants["dropout"]},
        "small-buckets": {"parallel.zero.bucket_mib": 0.01},
    }
    refused = {"zero8": ("trainer.global_batch_size", "8", "2", "8 data-parallel ranks", "a multiple of 16")}
    examples = {"bucket_mib": [0.01], "reduce_dtype": ["bf16"]}


class TestZeROOfGradients(TestZeRO):
    settings = {"parallel.zero.stage": 2, "parallel.zero.bucket_mib": 0.02}
    layouts = ("zero2",)
    checks_fields = False
    variants = {"everything": TestZeRO.variants["everything"]}
    refused = {}
