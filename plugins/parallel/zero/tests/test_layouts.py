"""ZeRO beside other strategies, with every optimizer: the run of one process."""

from typing import Any

import pytest
import tiny_models

from mplug import UsageError
from mplug.model.build import build_model
from mplug_testing.harness import tiny_run
from mplug_testing.parity import require_parity

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
SMALL = {"parallel.zero.bucket_mib": 0.02}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(("layout", "changes"), QUICK, ids=str)
def test_zero_beside_others_gives_the_run_of_one_process(layout: str, changes: dict[str, Any]) -> None:
    require_parity({**SMALL, **changes}, layout)


FROZEN_STAGE = {"model.num_layers": 4, "model.frozen": ["embedding", "blocks.0", "blocks.1"]}


def test_stage_2_under_a_schedule_that_splits_backward_is_refused_by_the_ranks_of_a_frozen_stage_too() -> None:
    """The host checks rank 0 before launch; the rank has no bucket here."""
    changes = {**FROZEN_STAGE, "parallel.pp.schedule": "zb-h1", "parallel.zero.stage": 2}
    with pytest.raises(UsageError, match=r"parallel/zero sums all gradients .* computes weight gradients later"):
        build_model(tiny_run({**changes, "parallel.layout": "zero2pp2"}))


def test_a_frozen_stage_has_no_buckets_and_the_run_is_that_of_one_process() -> None:
    require_parity({**FROZEN_STAGE, **STAGE2}, "zero2pp2")
