"""The table of the choice among default kernels."""

from click.testing import CliRunner
from mplug_explain import command


def test_a_kernel_without_a_rival_is_chosen_without_a_rate_that_was_measured_on_a_gpu() -> None:
    result = CliRunner().invoke(command, ["--data", "mock", "--set", "model.num_layers=1"])
    (row,) = (line for line in result.output.splitlines() if "chosen" in line)
    assert row.split(maxsplit=3)[2:] == ["kernels/sdpa", "chosen: the only one that serves it"], result.output
