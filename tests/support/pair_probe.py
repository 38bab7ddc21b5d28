"""Whether mplug refuses a case before it starts any process, and why."""

from unittest.mock import patch

from covering import Case
from pair_deaths import healing_of
from pair_features import HEALED, settings_of

from mplug.errors import UsageError
from mplug.model.build import build_model
from mplug_saving.states import refuse_unsavable_states
from mplug_testing.harness import tiny_run


def refusal_of(case: Case) -> str:
    """The refusal of a case's run; empty if mplug accepts it.

    The refusal does not name other kernels that would serve it: to try them takes a process for each.
    """
    with patch("mplug_estimates.unmet.kernels_that_would_do", return_value=""):
        try:
            refuse_unsavable_states(run := tiny_run(settings_of(case)), build_model(run))
            if case.get("resume") in HEALED:
                healing_of(settings_of(case))
        except UsageError as error:
            return str(error)
    return ""


def world_size_of(case: Case) -> int:
    """The number of ranks of an accepted case."""
    return tiny_run(settings_of(case)).mesh.world_size
