"""ZeRO beside other strategies, with every optimizer: the run of one process.

`pytest --wide layouts` runs the products.
"""

from itertools import product
from typing import Any

import pytest
import tiny_models
from mplug_testing.harness import tiny_run
from mplug_testing.parity import require_parity

from mplug import UsageError
from mplug.model.build import build_model

EXPERTS: dict[str, Any] = {**tiny_models.EXPERTS, "model.vocab_size": 320}
TIED = {"model.tie_embeddings": True}
STAGE2 = {"parallel.zero.stage": 2}
MUON = {"optimizer.name": "muon"}

QUICK: list[tuple[str, dict[str, Any]]] = [
    ("tp2zero2", STAGE2),
    ("zero2pp2", {**STAGE2, **TIED}),
    ("dp2zero2", {**STAGE2, "parallel.zero.overlap": False}),
    ("zero2", {**MUON, "model.vocab_size": 320}),  # the embedding fills its bucket, and the first rank owns it all
    ("zero4ep2", {**EXPERTS, **MUON}),
]
STAGES: tuple[dict[str, Any], ...] = ({}, STAGE2)
ONE_KV_HEAD = {"model.num_kv_heads": 1}
ONE_SAMPLE = {"trainer.micro_batch_size": 1}
"""Of a global batch of 8, each of 8 ranks has one."""
PRODUCTS = [
    *product(("zero4", "zero2pp2", "zero4pp2", "zero2pp4", "dp2zero2"), STAGES, ({}, TIED)),
    *product(("dp2zero4", "dp4zero2"), STAGES, (ONE_SAMPLE, {**ONE_SAMPLE, **TIED})),
    *product(("tp2zero2", "tp2zero4", "tp4zero2", "tp2zero2pp2", "dp2tp2zero2"), STAGES, (ONE_KV_HEAD, TIED)),
    *product(("cp2zero2", "cp2zero2pp2", "cp2tp2zero2", "dp2zero2pp2"), STAGES, ({}, TIED)),
    *product(("zero2ep2", "zero4ep2", "zero4ep4", "zero4ep2etp2", "zero2pp2ep2", "dp2zero2ep2"), STAGES, (EXPERTS,)),
    *product(("tp2zero2ep2", "cp2zero2ep2"), STAGES, (EXPERTS,)),
    *product(("zero4", "zero2pp2", "dp2zero2", "cp2zero2"), STAGES, (MUON, {**MUON, **TIED})),
    *product(("zero2ep2", "zero4ep2", "zero4ep4"), STAGES, ({**EXPERTS, **MUON},)),
    *product(("zero2",), STAGES, ({"optimizer.name": "lion"}, {"optimizer.name": "sgd"})),
    *product(("zero2",), STAGES, ({"trainer.compile": "aot_eager"},)),
]
WIDE = pytest.mark.wide("layouts")
ALL = [*QUICK, *(pytest.param(layout, {**stage, **more}, marks=WIDE) for layout, stage, more in PRODUCTS)]
SMALL = {"parallel.zero.bucket_mib": 0.02}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(("layout", "changes"), ALL, ids=str)
def test_zero_beside_others_gives_the_run_of_one_process(layout: str, changes: dict[str, Any]) -> None:
    require_parity({**SMALL, **changes}, layout)


FROZEN_STAGE = {"model.num_layers": 4, "model.frozen": ["embedding", "blocks.0", "blocks.1"]}


def test_stage_2_under_a_schedule_that_splits_backward_is_refused_by_the_ranks_of_a_frozen_stage_too() -> None:
    """The host checks rank 0 before launch; the rank has no bucket here."""
    changes = {**FROZEN_STAGE, "parallel.pp.schedule": "zb-h1", "parallel.zero.stage": 2}
    with pytest.raises(UsageError, match=r"parallel/zero sums all gradients .* computes weight gradients later"):
        build_model(tiny_run({**changes, "parallel.layout": "zero2pp2"}))


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.wide("layouts"))])
def test_a_frozen_stage_has_no_buckets_and_the_run_is_that_of_one_process(stage: int) -> None:
    require_parity({**FROZEN_STAGE, "parallel.zero.stage": stage}, "zero2pp2")
