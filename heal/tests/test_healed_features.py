"""Healing beside features that the pairs of tests/test_pairs.py lack: a run goes on as if no process had died."""

from pathlib import Path
from typing import Any

import pytest
from deaths import STEPS, continued_after, figures, healed

from mplug_testing.harness import EXACT

FEATURES: dict[str, dict[str, Any]] = {
    "a growing batch": {"schedule.batch_rampup": {"start": 4, "increment": 4, "samples": 12}},
    "asynchronous saves of all steps": {"checkpoint.asynchronous": True, "checkpoint.every": 1},
    "measured intervals": {"checkpoint.every": "auto", "extensions.heal.every": "auto"},
    "evaluations": {"trainer.eval_every": 2},
    "a loss scale": {"trainer.precision": "fp16"},
}


@pytest.mark.wide("kills")
@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("feature", FEATURES)
def test_a_run_with_a_feature_goes_on_as_if_no_process_had_died(tmp_path: Path, feature: str, spares: int) -> None:
    """It is compared with a run without a death under the same layout; in fp16, sums of fewer ranks round otherwise."""
    settings = {**FEATURES[feature], "extensions.heal.spares": spares}
    healed(tmp_path / "whole", "dp2", settings)
    healed(tmp_path / "healed", "dp2", settings, (5, 1, "backward"))
    found, expected = (figures(tmp_path / name / "runs" / "one") for name in ("healed", "whole"))
    bound = 1e-2 if feature == "a loss scale" and not spares else EXACT
    assert len(found) == len(expected) == STEPS
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=bound)
    assert continued_after(tmp_path / "healed") != []
