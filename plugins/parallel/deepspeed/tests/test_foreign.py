"""Checkpoints of DeepSpeed's own engine become runs of mplug: the same weights and moments, bit by bit."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_engine import BETAS, DECAY, EPS, LLAMA, LR, Llama, States, saved_in_turn
from safetensors.torch import load_file
from torch import Tensor

from mplug.checkpoint.folder import read_valid
from mplug.checkpoint.public_weights import conversion
from mplug.checkpoint.transfer import fill_theirs
from mplug.cli import main
from mplug.model.build import build_model
from mplug.run.prepare import prepare
from mplug.testing import run_workers, runs
from mplug.testing.harness import tiny_config

pytestmark = pytest.mark.skipif(
    find_spec("mplug_deepspeed") is None or find_spec("deepspeed") is None, reason="it is not installed"
)

ADAMW = {"optimizer.lr": LR, "optimizer.beta2": BETAS[1], "optimizer.eps": EPS, "optimizer.weight_decay": DECAY}
RUN: dict[str, Any] = {
    **ADAMW,
    "trainer.precision": "fp32",
    "trainer.max_grad_norm": 1.0,
    "trainer.global_batch_size": 4,
    "trainer.steps": 3,
    "trainer.eval_every": 0,
    "schedule.warmup_steps": 0,
}
OURS = {**RUN, "model.num_layers": 2, "model.vocab_size": 263}
OF_LLAMA = {
    **RUN,
    "model.name": "llama",
    "data.vocab_size": LLAMA["vocab_size"],
    **{
        f"model.{own}": LLAMA[theirs]
        for own, theirs in {
            "num_layers": "num_hidden_layers",
            "hidden_size": "hidden_size",
            "num_attention_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
            "ffn_hidden_size": "intermediate_size",
            "vocab_size": "vocab_size",
            "rope_theta": "rope_theta",
        }.items()
    },
    "model.qk_norm": False,
}
EVERYWHERE = {"stage3_param_persistence_threshold": 10**9}
"""Modules of ours read weights of the modules inside of them, which stage 3 does not gather for that."""


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **(EVERYWHERE if stage == 3 else {})}, **more}


def imported(folder: Path, settings: dict[str, Any], name: str = "imported", status: int = 0) -> Path:
    """Import a checkpoint by the command; returns the folder of the run's checkpoints."""
    tiny = Path(runs.__file__).with_name("tiny.yaml")
    words = [word for field, value in settings.items() for word in ("--set", f"{field}={value}")]
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "import", "--from", "deepspeed", str(folder), "--name", name, "--config", str(tiny), *words])
    assert int(ended.value.code or 0) == status
    return Path("runs", name, "checkpoints")


def tensors_of(path: Path) -> dict[str, Tensor]:
    read_valid(path)
    return {name.rpartition("@")[0]: one for name, one in load_file(path / "rank00000.safetensors").items()}


def require_equal(path: Path, settings: dict[str, Any], expected: States, moments: bool = True) -> None:
    """Fail unless a checkpoint has exactly these states, by our names or by those of the published form."""
    found, model = tensors_of(path), build_model(prepare(tiny_config(settings)))
    keys = ("weight", "exp_avg", "exp_avg_sq") if moments else ("weight",)
    public = {} if expected.keys() & model.placements.keys() else conversion(model).public
    assert (set(public) or set(model.placements)) == set(expected)
    for name, states in expected.items():
        for key in keys:
            if not public:
                assert torch.equal(found[f"{name}/{key}"], states[key]), (name, key)
                continue
            values = torch.full_like(states[key], float("nan"))
            fill_theirs(
                public[name],
                values,
                lambda ours, start, shape, key=key: found[f"{ours}/{key}"][
                    tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
                ],
            )
            assert torch.equal(values, states[key]), (name, key)
    if moments:
        assert {float(one) for name, one in found.items() if name.endswith("/step")} == {2.0}
    else:
        assert all(name.endswith("/weight") for name in found)


def require_same_third_step(path: Path, settings: dict[str, Any], third: States, folder: Path) -> None:
    witness = runs.trained(tiny_config(settings), folder, resume_from=path)
    assert list(witness.figures) == [3]
    for name, states in third.items():
        assert (witness.weights[name] - states["weight"]).abs().max() < 1e-5, name


@pytest.fixture(scope="module")
def stage_3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[States, States]]:
    """A checkpoint of stage 3 on two ranks, of a model of ours, and DeepSpeed's states then and one step later."""
    folder = tmp_path_factory.mktemp("stage3")
    return folder, run_workers(2, saved_in_turn, [(folder, "ours", OURS, zero(3))])[0][0]


def test_an_imported_run_has_the_states_of_stage_3_and_continues_as_deepspeed_does(
    stage_3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, (second, third) = stage_3
    monkeypatch.chdir(tmp_path)
    path = imported(folder, OURS) / "step_00000002"
    assert "the optimizer's states after step 2" in capfd.readouterr().out
    require_equal(path, OURS, second)
    require_same_third_step(path, OURS, third, tmp_path / "continued")
    assert any((second[name]["weight"] - third[name]["weight"]).abs().max() > 1e-3 for name in third)
