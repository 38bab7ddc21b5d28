"""A checkpoint of a run with divided states is a checkpoint like any other."""

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mplug import Run
from mplug.checkpoint import opened
from mplug.checkpoint.folder import newest
from mplug.checkpoint.newest_valid import choose
from mplug.checkpoint.plans import KeptPlans
from mplug.checkpoint.verified import Verified
from mplug.run.prepare import prepare
from mplug.training.loop import train
from mplug_testing import run_workers, runs
from mplug_testing.harness import EXACT, as_rank, tiny_config

NUMBER = 3
"""Pairs of layouts; the wide set `pairs` resumes runs of all features under others."""

SMALL = {
    "model.num_layers": 2,
    "model.tie_embeddings": True,
    "trainer.eval_every": 0,
    "trainer.precision": "fp64",
    "checkpoint.asynchronous": False,
    "parallel.zero.bucket_mib": 0.02,
}
SEED = 279
LAYOUTS = ("", "zero2", "zero4", "tp2zero2", "zero2pp2", "cp2zero2", "dp2zero2", "dp2", "tp2", "tp2pp2")


def trained(settings: dict[str, Any], steps: int, directory: Path, resume_from: Path | None = None) -> list[float]:
    """Be one rank of a run that is saved at its end: its losses."""
    config = tiny_config({**SMALL, **settings, "trainer.steps": steps})
    return runs.trained(config, directory, resume_from=resume_from).losses


def resaved(settings: dict[str, Any], directory: Path, resume_from: Path) -> None:
    """Be one rank of a run that loads a checkpoint, and saves it again as it is."""
    from mplug.training.assembly import build
    from mplug.training.position import Position

    run: Run = as_rank(prepare(tiny_config({**SMALL, **settings}), directory=directory))
    position = Position(run, build(run))
    position.load(position.choose(resume_from))
    position.save()


def begin(settings: dict[str, Any], steps: int, directory: Path, resume_from: Path | None = None) -> list[float]:
    size = prepare(tiny_config({**SMALL, **settings})).mesh.world_size
    return run_workers(size, trained, settings, steps, directory, resume_from)[0]


def save_again(settings: dict[str, Any], directory: Path, resume_from: Path) -> Path:
    size = prepare(tiny_config({**SMALL, **settings})).mesh.world_size
    run_workers(size, resaved, settings, directory, resume_from)
    return found(directory)


def found(directory: Path) -> Path:
    path = newest(directory / "checkpoints")
    assert path is not None
    return path


def hashes(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


def settings_of(layout: str, stage: int, optimizer: str = "adamw") -> dict[str, Any]:
    options: dict[str, Any] = {"parallel.zero.stage": stage} if "zero" in layout else {}
    return {"parallel.layout": layout, "optimizer.name": optimizer, **options}


@pytest.fixture(scope="module", params=["adamw", "muon"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    """An optimizer, and the losses of three steps in one process."""
    return request.param, begin(settings_of("", 1, request.param), 3, tmp_path_factory.mktemp("whole"))


def test_zero_then_one_process_then_zero_keeps_weights_and_moments_to_the_bit(
    whole: tuple[str, list[float]], tmp_path: Path, logical: Any
) -> None:
    optimizer, losses = whole
    told = begin(settings_of("zero2", 2, optimizer), 2, tmp_path / "a")
    first = found(tmp_path / "a")
    second = save_again(settings_of("", 1, optimizer), tmp_path / "b", first)
    third = save_again(settings_of("zero4", 1, optimizer), tmp_path / "c", second)
    wanted = hashes(logical(first))
    assert {name.rpartition("/")[2] for name in wanted} >= {"weight", "step", "exp_avg", "exp_avg_sq"}
    assert hashes(logical(second)) == wanted
    assert hashes(logical(third)) == wanted
    told += begin(settings_of("zero4", 1, optimizer), 3, tmp_path / "d", third)
    assert told == pytest.approx(losses, rel=EXACT)


def pairs() -> list[Any]:
    """Different layouts, one of them at least divided, with their stages."""
    drawn = random.Random(SEED)
    chosen = [(one, other) for one in LAYOUTS for other in LAYOUTS if one != other and "zero" in one + other]
    drawn.shuffle(chosen)
    return [(one, drawn.choice([1, 2]), other, drawn.choice([1, 2])) for one, other in chosen[:NUMBER]]


@pytest.mark.parametrize(("one", "stage", "other", "other_stage"), pairs())
def test_a_run_goes_on_under_any_other_layout(
    one: str, stage: int, other: str, other_stage: int, tmp_path: Path, logical: Any, reference: list[float]
) -> None:
    told = begin(settings_of(one, stage), 2, tmp_path / "a")
    saved = found(tmp_path / "a")
    again = save_again(settings_of(other, other_stage), tmp_path / "b", saved)
    assert hashes(logical(again)) == hashes(logical(saved))
    told += begin(settings_of(other, other_stage), 3, tmp_path / "c", saved)
    assert told == pytest.approx(reference, rel=EXACT)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of three steps in one process."""
    return begin(settings_of("", 1), 3, tmp_path_factory.mktemp("reference"))


def inferred(settings: dict[str, Any], path: Path) -> list[Tensor]:
    """The weights that a process without processes beside it loads for inference."""
    from mplug.checkpoint.states import load_for_inference

    model = load_for_inference(prepare(tiny_config({**SMALL, **settings})), path)
    return [parameter.detach() for parameter in model.parameters().values()]


def test_a_checkpoint_of_divided_states_serves_inference(tmp_path: Path, logical: Any) -> None:
    begin(settings_of("zero2", 2), 1, tmp_path)
    wanted = logical(found(tmp_path))
    model = inferred(settings_of("", 1), found(tmp_path))
    total = sum(tensor.numel() for name, tensor in wanted.items() if name.endswith("/weight"))
    assert sum(tensor.numel() for tensor in model) == total
    assert any(torch.equal(tensor, wanted["blocks.0.attn.qkv.weight/weight"]) for tensor in model)


def chosen(directory: Path) -> tuple[str, tuple[str, ...], list[bool]]:
    """Be one of two ranks that save two checkpoints, of which rank 1's file of the newer is damaged, and choose.

    Rank 1 must read no manifest. The last of the results says at which saves this rank has sent its plan.
    """
    sent, to_send = list[bool](), KeptPlans.to_send

    def noted(plans: KeptPlans, plan: bytes) -> bytes | None:
        found = to_send(plans, plan)
        sent.append(found is not None)
        return found

    KeptPlans.to_send = noted  # type: ignore[method-assign]
    settings = {**SMALL, "trainer.steps": 2, "checkpoint.every": 1, "parallel.layout": "zero2"}
    run: Run = as_rank(prepare(tiny_config(settings), directory=directory))
    train(run)
    damaged = newest(run.checkpoints)
    if run.rank == 0:
        file = damaged / "rank00001.safetensors"
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        opened.read_with_checksum = _refused
    dist.barrier()
    choice = choose(run, damaged, Verified())
    return choice.path.name, choice.skipped, sent


def _refused(path: Path) -> Any:
    raise AssertionError(f"rank 1 reads the manifest of {path}")


def test_all_ranks_choose_the_same_checkpoint_although_each_reads_other_files_and_one_the_manifest(
    tmp_path: Path,
) -> None:
    one, other = run_workers(2, chosen, tmp_path)
    assert one == other
    assert one[0] == "step_00000001"
    assert "'rank00001.safetensors' has changed since it was saved" in one[1][0]
    assert one[2] == [True, False], "the second save has the same parts"
