"""Runs of DeepSpeed's engine against one process of mplug: losses, gradient norms and weights of 20 steps."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from mplug.training.assembly import build
from mplug.training.schedule import learning_rate
from mplug_testing import run_workers
from mplug_testing.harness import changed_batches, logical, owned_values, tiny_run
from mplug_validation import evaluate

pytestmark = pytest.mark.skipif(
    find_spec("mplug_deepspeed") is None or find_spec("deepspeed") is None, reason="it is not installed"
)

STEPS = 20
CLOSE = 1e-5
BASE: dict[str, Any] = {
    "trainer.precision": "fp32",
    "trainer.steps": STEPS,
    "model.num_layers": 2,
    "model.hidden_size": 128,
    "schedule.name": "cosine",
    "schedule.warmup_steps": 4,
    "trainer.max_grad_norm": 1.0,
}


def trained(settings: dict[str, Any]) -> dict[str, Any]:
    run = tiny_run({**BASE, **settings})
    parts = build(run)
    config = run.config
    addresses = [(piece.master.data_ptr(), piece.gradient.data_ptr()) for piece in parts.pieces]
    found: dict[str, Any] = {"losses": [], "norms": [], "skipped": [], "scales": []}
    for step in range(1, STEPS + 1):
        run.step = step
        batches = changed_batches(parts, config.trainer.global_batch_size)
        parts.stepper.forward_backward(batches, step)
        lr = learning_rate(step, config.optimizer.lr, config.schedule, STEPS)
        result = parts.stepper.update(lr, config.optimizer.weight_decay)
        found["losses"].append(float(result.loss))
        found["norms"].append(float(result.grad_norm))
        found["skipped"].append(float(result.skipped))
        found["scales"].append(float(result.figures.get("loss_scale", 1)))
    assert [(piece.master.data_ptr(), piece.gradient.data_ptr()) for piece in parts.pieces] == addresses
    found["in_files"] = [is_in_a_file(one) for one in memory_of(parts)]
    found["shapes"] = {name: placement.shape for name, placement in parts.model.placements.items()}
    found["weights"] = owned_values(run, parts)
    found["val_loss"] = float(evaluate(run, parts))
    run.hooks.observe("run_finished", run=run)
    return found


def memory_of(parts: Any) -> list[torch.Tensor]:
    """The masters, gradients and optimizer states of this rank's pieces that are in large tensors."""
    found = [tensor for piece in parts.pieces for tensor in (piece.master, piece.gradient)]
    states = [state for piece in parts.pieces for state in parts.optimizer.state(piece).values()]
    large = [one for one in (*found, *states) if one.untyped_storage().nbytes() >= 1 << 16]
    assert len(large) > len(parts.pieces) // 2
    return large


def is_in_a_file(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is a map of a file that has no name any more."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/mplug-" in line and line.endswith("(deleted)"):
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            if begin <= tensor.data_ptr() < end:
                return True
    return False


def trained_in_turn(every: list[dict[str, Any]]) -> list[Any]:
    """Be one rank of several runs, one after the other: importing DeepSpeed takes most of a worker's time."""
    return [trained(settings) for settings in every]


def of_ranks(size: int, layout: str, cases: list[dict[str, Any]]) -> list[list[Any]]:
    """For every case, what each rank has found."""
    found = run_workers(size, trained_in_turn, [{"parallel.layout": layout, **case} for case in cases])
    return [list(of_case) for of_case in zip(*found, strict=True)]


def require_close(found: list[Any], reference: Any) -> None:
    """Fail unless every rank has the reference's losses and norms, and all together its weights."""
    for own in found:
        assert own["losses"] == pytest.approx(reference["losses"], rel=CLOSE)
        assert own["norms"] == pytest.approx(reference["norms"], rel=CLOSE)
        assert own["val_loss"] == pytest.approx(reference["val_loss"], rel=CLOSE)
    for name, shape in reference["shapes"].items():
        expected = logical([reference["weights"]], name, shape)
        error = (logical([own["weights"] for own in found], name, shape) - expected).norm() / expected.norm()
        assert float(error) < CLOSE, name


STAGES = [{"parallel.deepspeed.stage": stage} for stage in (1, 2, 3)]
OFFLOADED = [
    *({**stage, "parallel.deepspeed.offload_optimizer": True} for stage in STAGES),
    {**STAGES[2], "parallel.deepspeed.offload_optimizer": True, "parallel.deepspeed.offload_param": True},
]
FP16 = {"trainer.precision": "fp16", "trainer.loss_scale.growth_interval": 4}
LOW = [
    {"trainer.precision": "bf16", **STAGES[1]},
    {**FP16, **STAGES[0]},
    {**FP16, **STAGES[2], "trainer.loss_scale.initial": 2.0**28},
]


@pytest.fixture(scope="module")
def alone() -> Any:
    return run_workers(1, trained, {})[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


def in_files(folder: Path) -> dict[str, Any]:
    return {**OFFLOADED[-1], "parallel.deepspeed.nvme_path": str(folder)}


@pytest.fixture(scope="module")
def together(folder: Path) -> list[list[Any]]:
    return of_ranks(2, "deepspeed2", [STAGES[2], in_files(folder)])


@pytest.fixture(scope="module")
def in_low_precision() -> list[list[Any]]:
    return of_ranks(2, "deepspeed2", LOW)


@pytest.mark.wide("layouts")
def test_stage_3_gives_20_steps_of_one_process(alone: Any, together: list[Any]) -> None:
    require_close(together[0], alone)


@pytest.mark.wide("layouts")
def test_states_and_weights_in_files_give_20_steps_of_one_process_and_leave_nothing(
    alone: Any, together: list[Any], folder: Path
) -> None:
    require_close(together[1], alone)
    assert all(all(own["in_files"]) for own in together[1])
    assert not any(any(own["in_files"]) for own in together[0])
    assert list(folder.iterdir()) == []


@pytest.mark.wide("precision")
def test_bf16_and_fp16_stay_near_fp32_while_the_loss_scale_rises(alone: Any, in_low_precision: list[Any]) -> None:
    for found in in_low_precision[:2]:
        for own in found:
            assert own["skipped"] == [0.0] * STEPS
            assert own["losses"] == pytest.approx(alone["losses"], rel=0.02)
            assert own["norms"][:5] == pytest.approx(alone["norms"][:5], rel=0.05)
    scales = in_low_precision[1][0]["scales"]
    assert scales[0] == 4096
    assert scales[-1] >= 4 * scales[0]  # the norm of a step after which the scale rises is right as well


@pytest.mark.wide("precision")
def test_an_overflow_in_fp16_skips_the_step_and_lowers_the_scale(alone: Any, in_low_precision: list[Any]) -> None:
    for own in in_low_precision[2]:
        assert own["skipped"][0] == 1
        assert own["losses"][1] == pytest.approx(own["losses"][0], rel=0.2)
        assert own["skipped"][-1] == 0
        assert own["scales"][-1] < own["scales"][0]
        assert own["losses"] == pytest.approx(alone["losses"], rel=0.1)  # a few updates later than in fp32


@pytest.mark.wide("suites")
def test_the_comparison_notices_another_batch(alone: Any) -> None:
    other = {**alone, "losses": [loss * (1 + 3 * CLOSE) for loss in alone["losses"]]}
    with pytest.raises(AssertionError):
        require_close([other], alone)


LAYOUTS = {
    "deepspeed2": [*STAGES[:2], *OFFLOADED],
    "deepspeed1": [*STAGES, *OFFLOADED],
    **{f"{other}2deepspeed2": [*STAGES, OFFLOADED[0]] for other in ("tp", "cp", "dp")},
}


@pytest.mark.wide("layouts", quick=["deepspeed2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_offloaded_alone_and_beside_other_strategies_a_run_gives_20_steps_of_one_process(
    alone: Any, layout: str
) -> None:
    size = tiny_run({"parallel.layout": layout, "trainer.precision": "fp32"}).mesh.world_size
    for found in of_ranks(size, layout, LAYOUTS[layout]):
        require_close(found, alone)


@pytest.mark.wide("layouts")
def test_files_beside_tensor_parallelism_sub_groups_and_bf16(alone: Any, folder: Path, tmp_path: Path) -> None:
    """A file of DeepSpeed names the folders; several sub-groups have several files."""
    offload = {"device": "nvme", "nvme_path": str(folder), "pin_memory": True, "buffer_count": 4}
    zero = {"stage": 3, "sub_group_size": 60_000, "offload_optimizer": offload, "offload_param": offload}
    (tmp_path / "file.json").write_text(json.dumps({"zero_optimization": zero}))
    settings = {"parallel.deepspeed.config": str(tmp_path / "file.json")}
    (found,) = of_ranks(4, "tp2deepspeed2", [settings])
    require_close(found, alone)
    assert all(all(own["in_files"]) for own in found)
    low = {"trainer.precision": "bf16"}
    files, memory = of_ranks(2, "deepspeed2", [{**settings, **low}, {**OFFLOADED[-1], **low}])
    assert files[0]["losses"] == memory[0]["losses"]
    assert list(folder.iterdir()) == []


@pytest.mark.wide("layouts")
def test_options_of_a_file_give_20_steps_of_one_process(alone: Any, tmp_path: Any) -> None:
    """Sub-groups, no reduce-scatter, overlap, small buckets, accumulation in fp32."""
    cases = []
    for number, zero in enumerate(
        (
            {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 4096},
            {"stage": 2, "reduce_scatter": False, "allgather_bucket_size": 4096},
            {"stage": 3, "sub_group_size": 2000, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 4096},
            {"stage": 3, "overlap_comm": False, "stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0},
        )
    ):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps({"zero_optimization": zero, "train_batch_size": "auto"}))
        cases.append({"parallel.deepspeed.config": str(path)})
    for found in of_ranks(2, "deepspeed2", cases):
        require_close(found, alone)


GROUPS = {
    "optimizer.groups": [
        {"match": "embedding", "lr_scale": 0.25, "weight_decay_scale": 0},
        {"match": "blocks.1", "lr_scale": 2, "weight_decay_scale": 3},
    ]
}


@pytest.mark.wide("layouts")
def test_groups_of_parameters_give_20_steps_of_one_process() -> None:
    (reference,) = run_workers(1, trained, GROUPS)
    for found in of_ranks(2, "deepspeed2", [{**GROUPS, **stage} for stage in [*STAGES, *OFFLOADED[2:]]]):
        require_close(found, reference)


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("groups", [{}, GROUPS], ids=["", "groups"])
@pytest.mark.parametrize("optimizer", ["deepspeed_cpu_adam", "deepspeed_adam"])
def test_deepspeeds_adam_gives_20_steps_of_adamw(alone: Any, optimizer: str, groups: dict[str, Any]) -> None:
    """Builds the operator, which takes a minute once per machine."""
    same = {"optimizer.lr": 5e-3, "optimizer.weight_decay": 0.1}
    case = {"optimizer.name": optimizer, **same, "parallel.deepspeed.offload_optimizer": True, **STAGES[1], **groups}
    (found,) = of_ranks(2, "deepspeed2", [case])
    require_close(found, run_workers(1, trained, groups)[0] if groups else alone)


@pytest.mark.wide("layouts")
def test_matrices_in_the_memory_of_the_engine_come_together() -> None:
    """Muon's iteration in fp32 amplifies rounding, so the bound is wider than that of AdamW."""
    muon = {"optimizer.name": "muon", "optimizer.lr": 1e-3}
    (reference,) = run_workers(1, trained, muon)
    for found in of_ranks(2, "deepspeed2", [{**stage, **muon} for stage in (STAGES[1], STAGES[2])]):
        for own in found:
            assert own["losses"] == pytest.approx(reference["losses"], rel=1e-3)
        for name, shape in reference["shapes"].items():
            expected = logical([reference["weights"]], name, shape)
            error = (logical([own["weights"] for own in found], name, shape) - expected).norm() / expected.norm()
            assert float(error) < 1e-3, name
