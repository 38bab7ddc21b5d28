"""Pipeline parallelism passes the suite of strategies, under every schedule and division."""

from mplug.testing import ParallelSuite


class TestPipelineParallel(ParallelSuite):
    plugin = "pp"
    layouts = ("pp2", "pp4")
    variants = {
        "everything": {**ParallelSuite.variants["another-model"], **ParallelSuite.variants["dropout"]},
        "gpipe": {"parallel.pp.schedule": "gpipe"},
        "three-layers": {"model.num_layers": 3},
        "units-per-stage": {"parallel.pp.units_per_stage": [2, 4]},
        "one-micro-batch": {"trainer.micro_batch_size": 8},
    }
    refused = {"pp6": ("pp=6", "5 units", "use pp=5 or less")}
