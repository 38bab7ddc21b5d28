"""`benchmarks/norms.py`: what it counts and compares, and what it refuses."""

import os
from argparse import Namespace
from typing import Any

import pytest
import torch
from scripts import script

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.fixture(scope="module")
def norms() -> Any:
    return script("benchmarks/norms.py")


def options(**changes: Any) -> Namespace:
    return Namespace(**{"rows": 70, "width": 24, "kind": "layernorm", "bias": True, "dtype": "fp32", **changes})


@pytest.mark.parametrize(("residual", "forward"), [(False, 2), (True, 4)])
def test_the_bytes_are_those_of_the_rows_that_must_move(norms: Any, residual: bool, forward: int) -> None:
    problem = norms.Problem(options(dtype="bf16"), residual, "cpu")
    assert problem.bytes == (forward * 70 * 24 * 2, 4 * 70 * 24 * 2)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("residual", [False, True])
def test_a_pass_is_timed_and_a_supplier_that_is_wrong_differs(norms: Any, residual: bool, kind: str) -> None:
    problem = norms.Problem(options(kind=kind), residual, "cpu")

    def doubled(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        y, summed = norms.norm_residual(*arguments)
        return 2 * y, summed

    assert min(problem.times(norms.norm_residual)) > 0
    assert norms.difference(problem, norms.norm_residual) == 0
    assert norms.difference(problem, doubled) >= 1


@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("residual", [False, True])
def test_the_kernel_that_it_measures_does_not_differ(norms: Any, residual: bool) -> None:
    (kernel,) = norms.named([norms.TRITON]).values()
    assert norms.difference(norms.Problem(options(), residual, DEVICE), kernel) < 1e-5


@pytest.mark.parametrize(
    ("has_gpu", "arguments", "reason"),
    [
        (False, [], "torch finds no GPU on this machine"),
        (True, ["--rows", "0"], "--rows is 0; it must be at least 1"),
        (True, ["--supplier", "mplug_nn.norm"], "--supplier must be MODULE:FUNCTION"),
        (True, ["--supplier", "mplug_nobody:norm"], "No module named 'mplug_nobody'"),
        (True, ["--supplier", "mplug_nn.norm:norm_residul"], "no attribute 'norm_residul'"),
    ],
)
def test_what_it_cannot_measure_is_refused_with_the_reason(
    norms: Any,
    has_gpu: bool,
    arguments: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with pytest.raises(SystemExit) as refused:
        norms.main(arguments)
    assert refused.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's own, as it compiles
def test_on_a_gpu_it_prints_a_line_for_each_way_with_and_without_a_residual(
    norms: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    norms.main(["--rows", "4096", "--width", "1024", "--repeats", "3"])
    told = capsys.readouterr().out
    assert "4,096 rows of 1,024 in bf16" in told
    assert told.count("plain torch") == told.count(norms.TRITON) == 2
