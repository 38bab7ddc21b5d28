"""Which copies are compared, which rank is named, and what a run with a flipped bit does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from mplug_corruption.copies import INTEGERS, Copies, checksum, coefficients, differences

from mplug import hookimpl
from mplug.errors import RunError
from mplug.registry.hooks import HOST
from mplug.run.prepare import prepare
from mplug.training.loop import train
from mplug_testing import ExtensionSuite
from mplug_testing.harness import as_rank, tiny_config
from mplug_testing.workers import run_workers

EVERY = {"extensions.corruption.every": 1}


class TestCorruption(ExtensionSuite):
    plugin = "corruption"
    settings = EVERY


class BitFlip:
    """Flips the lowest bit of one element of a tensor of a rank, when step `at` begins."""

    def __init__(self, kind: str, rank: int, at: int) -> None:
        self.kind, self.rank, self.at = kind, rank, at
        self.tensor: torch.Tensor | None = None

    @hookimpl
    def training_built(self, model: Any, pieces: Any, optimizer: Any) -> None:
        self.model, self.pieces, self.optimizer = model, pieces, optimizer

    @hookimpl
    def activity_began(self, run: Any) -> None:
        """Before the observers of `step_started`, as a fault between two steps."""
        if run.rank != self.rank or run.activity.name != "step" or run.step != self.at:
            return
        name, weight = next((name, one) for name, one in self.model.parameters().items() if one.dim() == 1)
        piece = next((one for one in self.pieces if one.name == name), self.pieces[0])
        values = weight.detach() if self.kind == "weight" else self.optimizer.state(piece)["exp_avg"]
        values.view(INTEGERS[values.element_size()]).view(-1)[0] ^= 1


def run_with(settings: Mapping[str, Any], flip: BitFlip, directory: str) -> str:
    config = tiny_config({"trainer.steps": 4, "checkpoint.every": 0, "extensions.corruption": {}, **EVERY, **settings})
    run = as_rank(prepare(config, {f"{HOST}flip": flip}, Path(directory)))
    run.device = "cpu"
    try:
        train(run)
    except RunError as error:
        return str(error)
    return ""


def test_a_comparison_that_fails_ends_the_run_and_is_no_error_of_an_observer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The connection to a rank that has died breaks in it; the launcher names that rank."""

    def breaks(copies: Copies) -> None:
        raise RuntimeError("the connection is closed")

    monkeypatch.setattr(Copies, "compare", breaks)
    assert "the connection is closed" in run_with({}, BitFlip("weight", 1, 3), str(tmp_path))
    assert "observer" not in capfd.readouterr().err


def test_the_coefficients_of_copies_add_up_to_0() -> None:
    for number in range(2, 20):
        assert len(coefficients(number)) == number
        assert sum(coefficients(number)) == 0
        assert 0 not in coefficients(number)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_checksum_finds_each_flipped_bit_and_no_minus_zero_is_missed(dtype: torch.dtype) -> None:
    values = torch.randn(3, 8, dtype=dtype)[:, 2:5]
    before, bits = checksum(values).clone(), values.element_size() * 8
    for bit in range(bits):
        flipped = values.clone()
        flipped.view(INTEGERS[values.element_size()])[1, 2] ^= 1 << bit if bit < bits - 1 else -(1 << bit)
        assert checksum(flipped) != before
    assert checksum(values) == before


def test_a_majority_names_the_rank_and_two_copies_name_both() -> None:
    hosts = ["node0", "node0", "node1", "node1"]
    odd = {"weight 'norm' [0] [8]": (1, (0, 1, 3))}, {"weight 'norm' [0] [8]": (1, (0, 1, 3))}, {}
    (sentence,) = differences(hosts, [*odd, {"weight 'norm' [0] [8]": (2, (0, 1, 3))}])
    assert sentence == "rank 3 on node1 holds other bits of the weight 'norm' than the 2 ranks with an equal copy"
    pair = [{"weight 'norm' [0] [8]": (value, (0, 1))} for value in (1, 2)]
    (sentence,) = differences(hosts, pair)
    assert sentence == (
        "rank 0 on node0 and rank 1 on node0 hold different bits of the weight 'norm', and no majority shows which one "
        "is wrong"
    )


@pytest.mark.wide("layouts", quick=["dp4-state-1-optimizer state 'exp_avg' of"])
@pytest.mark.parametrize(
    ("layout", "kind", "rank", "named"),
    [
        ("dp4", "weight", 2, "rank 2 on"),
        ("dp4", "state", 1, "optimizer state 'exp_avg' of"),
        ("tp4", "weight", 3, "rank 3 on"),
        ("pp2dp2", "weight", 3, "rank 2 on"),
    ],
)
def test_a_flipped_bit_ends_the_run_with_the_rank_and_the_tensor(
    layout: str, kind: str, rank: int, named: str, tmp_path: Path
) -> None:
    sentences = run_workers(4, run_with, {"parallel.layout": layout}, BitFlip(kind, rank, 3), str(tmp_path))
    assert len(set(sentences)) == 1
    assert sentences[0].startswith("after step 2, ")
    assert named in sentences[0]
    assert f"rank {rank} on" in sentences[0]


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("layout", ["dp2tp2", "pp2dp2", "zero4", "fsdp2tp2", "cp2dp2"])
def test_copies_are_equal_under_a_layout(layout: str, tmp_path: Path) -> None:
    never = BitFlip("weight", 0, 99)
    assert set(run_workers(4, run_with, {"parallel.layout": layout}, never, str(tmp_path))) == {""}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_computes_the_checksum_of_the_cpu(dtype: torch.dtype) -> None:
    values = torch.randn(1000, 1001).to(dtype)
    assert int(checksum(values.cuda())) == int(checksum(values))
