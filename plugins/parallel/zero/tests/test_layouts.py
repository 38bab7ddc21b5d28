"""ZeRO beside a pipeline whose first stage is frozen. `tests/test_pairs.py` combines ZeRO with all other features."""

import pytest
from layout_runs import assert_refused

from mplug_testing.parity import require_parity

FROZEN_STAGE = {"model.num_layers": 4, "model.frozen": ["embedding", "blocks.0", "blocks.1"], "parallel.zero.stage": 2}


def test_stage_2_under_a_schedule_that_splits_backward_is_refused_by_the_ranks_of_a_frozen_stage_too() -> None:
    """The host checks rank 0 before launch; the rank has no bucket here."""
    said = ("parallel/zero sums all gradients", "computes weight gradients later")
    assert_refused("zero2pp2 parallel.pp.schedule=zb-h1", FROZEN_STAGE, *said)


@pytest.mark.wide("layouts")
def test_a_frozen_stage_has_no_buckets_and_the_run_is_that_of_one_process() -> None:
    require_parity(FROZEN_STAGE, "zero2pp2")
