"""ZeRO beside other strategies, with every optimizer: the run of one process."""

from typing import Any

import pytest
import tiny_models
from layout_runs import assert_refused, under

from mplug_testing.parity import require_parity

EXPERTS: dict[str, Any] = {**tiny_models.EXPERTS, "model.vocab_size": 320}
SMALL = {"parallel.zero.bucket_mib": 0.02}
QUICK: dict[str, dict[str, Any]] = {
    "tp2zero2 parallel.zero.stage=2": {},
    "zero2pp2 parallel.zero.stage=2 model.tie_embeddings=true": {},
    "dp2zero2 parallel.zero.stage=2 parallel.zero.overlap=false": {},
    "zero2 optimizer.name=muon model.vocab_size=320": {},
    "zero4ep2 optimizer.name=muon": EXPERTS,
    "zero1cp2 parallel.zero.over=data": {},
    "zero2cp2 parallel.zero.over=data parallel.zero.stage=2": {},
    "dp2zero2 parallel.zero.over=data": {},
    "zero1cp2pp2 parallel.zero.over=data": {},
}


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("layout", QUICK)
def test_zero_beside_others_gives_the_run_of_one_process(layout: str) -> None:
    settings = under(layout, {**SMALL, **QUICK[layout]})
    require_parity(settings, settings["parallel.layout"])


FROZEN_STAGE = {"model.num_layers": 4, "model.frozen": ["embedding", "blocks.0", "blocks.1"], "parallel.zero.stage": 2}


def test_stage_2_under_a_schedule_that_splits_backward_is_refused_by_the_ranks_of_a_frozen_stage_too() -> None:
    """The host checks rank 0 before launch; the rank has no bucket here."""
    said = ("parallel/zero sums all gradients", "computes weight gradients later")
    assert_refused("zero2pp2 parallel.pp.schedule=zb-h1", FROZEN_STAGE, *said)


@pytest.mark.wide("layouts")
def test_a_frozen_stage_has_no_buckets_and_the_run_is_that_of_one_process() -> None:
    require_parity(FROZEN_STAGE, "zero2pp2")
