"""A checkpoint of a run with divided states is a checkpoint like any other."""

import hashlib
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from checkpoints import flip_bit
from torch import Tensor

from mplug import Run
from mplug.run.prepare import prepare
from mplug.training.loop import train
from mplug_pretrained.inference import load_for_inference
from mplug_saving import opened
from mplug_saving.folder import newest
from mplug_saving.newest_valid import choose
from mplug_saving.plans import KeptPlans
from mplug_saving.verified import Verified
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


def rank(settings: dict[str, Any], steps: int, directory: Path, resume_from: Path | None) -> list[float]:
    """Be one rank: train to a step, save and return the losses; with `steps` 0, load a checkpoint and save it again."""
    from mplug.training.assembly import build
    from mplug_saving.position import Position

    config = tiny_config({**SMALL, **settings, "trainer.steps": steps or 9})
    if steps:
        return runs.trained(config, directory, resume_from=resume_from).losses
    run: Run = as_rank(prepare(config, directory=directory))
    position = Position(run, build(run))
    position.load(position.choose(cast(Path, resume_from)))
    position.save()
    return []


def begin(settings: dict[str, Any], steps: int, directory: Path, resume_from: Path | None = None) -> list[float]:
    size = prepare(tiny_config({**SMALL, **settings})).mesh.world_size
    return run_workers(size, rank, settings, steps, directory, resume_from)[0]


def found(directory: Path) -> Path:
    return newest(directory / "checkpoints")


def hashes(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


def settings_of(layout: str, stage: int, optimizer: str = "adamw") -> dict[str, Any]:
    options: dict[str, Any] = {"parallel.zero.stage": stage} if "zero" in layout else {}
    return {"parallel.layout": layout, "optimizer.name": optimizer, **options}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """The losses of three steps in one process with an optimizer."""
    return cache(lambda optimizer: begin(settings_of("", 1, optimizer), 3, tmp_path_factory.mktemp("whole")))


def chains() -> list[Any]:
    """An optimizer, and (layout, ZeRO stage) of runs that continue one from another.

    First some from ZeRO through one process to ZeRO, then drawn pairs of layouts of which one at least is divided.
    """
    drawn = random.Random(SEED)
    chosen = [(one, other) for one in LAYOUTS for other in LAYOUTS if one != other and "zero" in one + other]
    drawn.shuffle(chosen)
    through_one: list[Any] = [(name, [("zero2", 2), ("", 1), ("zero4", 1)]) for name in ("adamw", "muon")]
    pairs = [("adamw", [(name, drawn.choice([1, 2])) for name in pair]) for pair in chosen[:NUMBER]]
    return [*through_one, *pairs[:1], *(pytest.param(*pair, marks=pytest.mark.wide("reshard")) for pair in pairs[1:])]


@pytest.mark.parametrize(("optimizer", "layouts"), chains())
@pytest.mark.wide("reshard")
def test_a_run_goes_on_under_any_other_layout_and_keeps_weights_and_moments_to_the_bit(
    optimizer: str,
    layouts: list[tuple[str, int]],
    tmp_path: Path,
    logical: Any,
    reference: Callable[[str], list[float]],
) -> None:
    first, *others = (settings_of(layout, stage, optimizer) for layout, stage in layouts)
    losses = begin(first, 2, tmp_path / "first")
    saved = found(tmp_path / "first")
    wanted = hashes(logical(saved))
    assert {name.rpartition("/")[2] for name in wanted} >= {"weight", "step", "exp_avg", "exp_avg_sq"}
    for number, settings in enumerate(others):
        begin(settings, 0, tmp_path / f"again{number}", saved)
        saved = found(tmp_path / f"again{number}")
        assert hashes(logical(saved)) == wanted
    losses += begin(others[-1], 3, tmp_path / "last", saved)
    assert losses == pytest.approx(reference(optimizer), rel=EXACT)


def test_a_checkpoint_of_divided_states_serves_inference_in_a_process_alone(tmp_path: Path, logical: Any) -> None:
    begin(settings_of("zero2", 2), 1, tmp_path)
    wanted = logical(found(tmp_path))
    model = load_for_inference(prepare(tiny_config({**SMALL, **settings_of("", 1)})), found(tmp_path)).parameters()
    total = sum(tensor.numel() for name, tensor in wanted.items() if name.endswith("/weight"))
    assert sum(tensor.numel() for tensor in model.values()) == total
    assert any(torch.equal(tensor, wanted["blocks.0.attn.qkv.weight/weight"]) for tensor in model.values())


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
        flip_bit(damaged / "rank00001.safetensors")
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
