"""Energon's streams go on exactly where they were killed, under any layout whose ranks divide them."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mplug_testing.resume import require_exact_resume

LAYOUTS = st.sampled_from(["", "dp2", "dp4", "tp2", "dp2tp2"])
PORTIONS = st.lists(st.integers(1, 4).map(lambda number: 4 * number), max_size=3)
ALIKE = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@given(LAYOUTS, PORTIONS, LAYOUTS)
@settings(max_examples=10, suppress_health_check=ALIKE)
def test_streams_resume_exactly_after_a_kill(text_set: Path, before: str, portions: list[int], after: str) -> None:
    own = {
        "data.name": "energon",
        "data.path": str(text_set),
        "data.streams": 4,
        "data.shuffle_buffer_size": 8,
        "trainer.seq_length": 32,
    }
    require_exact_resume(own, before, portions, after, count=24)


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")  # Energon forks, which Python 3.12 tells of
def test_worker_processes_resume_exactly_after_a_kill(text_set: Path) -> None:
    own = {
        "data.name": "energon",
        "data.path": str(text_set),
        "data.streams": 2,
        "data.num_workers": 1,
        "data.shuffle_buffer_size": 8,
        "trainer.seq_length": 32,
    }
    require_exact_resume(own, "dp2", [8], "", count=8)
